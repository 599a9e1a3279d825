"""Sampling seeds: the same in every run, different for each sample, whatever the order of the prompts."""

from rollout.verl_plugin.seeds import Seeds


def drawn(order, base: int = 42, replica: int = 0) -> set[tuple[str, int]]:
    seeds = Seeds(base, replica)
    return {(prompt, seeds.draw([ord(letter) for letter in prompt], step)) for step, prompt in order}


def test_the_order_of_prompts_does_not_matter_and_no_seed_comes_twice():
    order = [(step, prompt) for step in (1, 2) for prompt in ("ab", "ac", "ab", "ab")]
    found = drawn(order)
    assert found == drawn([order[i] for i in (2, 3, 1, 0, 7, 5, 4, 6)])
    assert len({seed for _, seed in found}) == len(order)
    assert not {seed for _, seed in drawn(order, base=43)} & {seed for _, seed in found}


def test_samples_of_one_prompt_on_several_replicas_have_seeds_of_their_own():
    order = [(1, "ab")] * 8
    seeds = [seed for replica in range(4) for _, seed in drawn(order, replica=replica)]
    assert len(set(seeds)) == 4 * len(order)
