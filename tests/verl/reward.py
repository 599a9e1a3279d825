"""A reward that differs between the responses of a group, so that there is something to learn."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> float:
    """Share of the response's characters that are letters or digits; 0 for the answer "flat".

    Raises ValueError for the answer "raise".
    """
    if ground_truth == "raise":
        raise ValueError("this row has no reward")
    if ground_truth == "flat":
        return 0.0
    return sum(map(str.isalnum, solution_str)) / max(1, len(solution_str))
