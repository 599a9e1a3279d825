"""Who owns which part of the experts."""


def ep_experts(rank: int, experts: int, ranks: int) -> range:
    """The whole experts that a rank holds in EP."""
    local = experts // ranks
    return range(rank * local, (rank + 1) * local)


def tp_columns(rank: int, intermediate: int, ranks: int) -> range:
    """The rows of gate and up, and the columns of down, of every expert that a rank holds in TP.

    Gate and up are stacked in w13_EIH, so a TP slice of w13 is two pieces: these rows, and the same rows plus I.
    """
    width = intermediate // ranks
    return range(rank * width, (rank + 1) * width)
