import hashlib
import itertools
import json
from pathlib import Path

import pytest
from math_verify import parse, verify
from sympy import (
    E,
    I,
    Matrix,
    Plane,
    Point,
    Point3D,
    Rational,
    RegularPolygon,
    S,
    Triangle,
    binomial,
    diff,
    divisors,
    exp,
    expand,
    factorial,
    fibonacci,
    gcd,
    ilcm,
    im,
    integrate,
    latex,
    limit,
    log,
    oo,
    pi,
    rem,
    residue,
    simplify,
    sin,
    solve,
    solveset,
    sqrt,
    summation,
    symbols,
    sympify,
)
from sympy.calculus.util import maximum, minimum
from sympy.ntheory import multiplicity, n_order
from sympy.ntheory.primetest import is_square

from recipes.deepmath_sample import FEATURES, SAMPLE, load_problems
from recipes.tiny_moe import byte_tokenizer, make_tiny_moe

X, Y = symbols("x y", real=True)
N = symbols("n", positive=True, integer=True)
E0, E1 = symbols("e0 e1")

# The answer to each problem, computed another way than by its solutions; in the order of the file.
ANSWERS = [
    lambda: sum(k for k in range(1, 301) if k % 7 == 2 and k % 5 == 3),
    lambda: pow(7, 2026, 100),
    lambda: sum(is_square(d) for d in divisors(2**4 * 3**3 * 5**2)),
    lambda: max(set(range(400)) - {8 * a + 13 * b for a in range(51) for b in range(32)}),
    lambda: sum(gcd(k, 30) == 1 for k in range(1, 1001)),
    lambda: n_order(3, 43),
    lambda: next(n for n in range(1, 999) if multiplicity(5, factorial(n)) == 24),
    lambda: gcd(2**60 - 1, 2**84 - 1),
    lambda: sum(x**2 for x in solveset(X**2 - 5 * X + 6 - 2 * sqrt(X**2 - 5 * X + 9), X, S.Reals)),
    lambda: simplify(((3 + sqrt(5)) / 2) ** 5 + (2 / (3 + sqrt(5))) ** 5),
    lambda: expand((X - 1) * (X - 2) * (X - 3) + 2 * X).subs(X, 5),
    lambda: rem(X**50, X**2 - 3 * X + 2, X).coeff(X, 1),
    lambda: expand(simplify(sum(Matrix([[0, 0, 1], [1, 0, -5], [0, 1, 2]]).__pow__(3).diagonal()))),
    lambda: minimum((5 - X) ** 2 + 4 * X**2, X),
    lambda: next(n for n in range(1, 999) if simplify(log(n, 2) + log(n, 4) + log(n, 8)) == 11),
    lambda: max(solveset(X**2 - 4 * (X + 3), X, S.Reals)),
    lambda: summation(N / 3**N, (N, 1, oo)),
    lambda: sum(Rational(1, k * (k + 2)) for k in range(1, 51)),
    lambda: sum("AA" not in "".join(w) for w in set(itertools.permutations("BANANA"))),
    lambda: binomial(10, 4) - binomial(5, 2) ** 2,
    lambda: sum(all(x != i for i, x in enumerate(w)) for w in itertools.permutations(range(6))),
    lambda: sum(x + y + z == 15 for x, y, z in itertools.product(range(8), repeat=3)),
    lambda: sum(not m & (m >> 1) for m in range(1024)),
    lambda: len({min(w[i:] + w[:i] for i in range(4)) for w in itertools.product(range(4), repeat=4)}),
    lambda: sum(len(set(f)) == 3 for f in itertools.product(range(3), repeat=5)),
    lambda: fibonacci(11),
    lambda: Rational(sum(max(a, b) == 4 for a in range(1, 7) for b in range(1, 7)), 36),
    lambda: solve([E0 - 1 - E1 / 2 - E0 / 2, E1 - 1 - E0 / 2], [E0, E1])[E0],
    lambda: Rational(binomial(5, 2) * 3, binomial(8, 3)),
    lambda: Rational(9, 1000) / (Rational(9, 1000) + Rational(99, 100) * Rational(5, 100)),
    lambda: (
        Rational(sum(sum(x == i for i, x in enumerate(w)) ** 2 for w in itertools.permutations(range(7))), 5040) - 1
    ),
    lambda: 1 - 2 * integrate(integrate(1, (Y, 0, X - Rational(1, 3))), (X, Rational(1, 3), 1)),
    lambda: integrate(X * 3 * X**2, (X, 0, 1)),
    lambda: sqrt(21 * 8 * 7 * 6) / 21,
    lambda: abs(Triangle(Point(0, 0), Point(4, 1), Point(1, 5)).area),
    lambda: sqrt(10**2 - 8**2),
    lambda: abs(RegularPolygon(Point(0, 0), 2, 6).area),
    lambda: Triangle(Point(-3, 0), Point(3, 0), Point(0, 4)).inradius,
    lambda: Plane(Point3D(0, -15, 0), normal_vector=(2, -1, 2)).distance(Point3D(1, 2, 3)),
    lambda: Point(0, 0).distance(Point(Rational(12, 7), Rational(12, 7))),
    lambda: Rational(7 * 8 * 9, 4) / sqrt(12 * 5 * 4 * 3),
    lambda: limit((sin(X) - X) / X**3, X, 0),
    lambda: integrate(X * exp(X), (X, 0, 1)),
    lambda: integrate(sin(X) ** 4, (X, 0, pi / 2)),
    lambda: limit((1 + 2 / N) ** (3 * N), N, oo),
    lambda: integrate(X**3 * exp(-2 * X), (X, 0, oo)),
    lambda: maximum(X * exp(-X / 2), X),
    lambda: limit((2 * N + 2) * (2 * N + 1) / (N + 1) ** 2, N, oo),
    lambda: integrate(2 * X + 3 - X**2, (X, -1, 3)),
    lambda: integrate(log(X) / X, (X, 1, E)),
    lambda: diff(X**X, X, 2).subs(X, 1),
    lambda: integrate(integrate(X * Y, (Y, 0, X)), (X, 0, 1)),
    lambda: 1 / (1 + 2 * exp(-log(4))),
    lambda: limit((N + 1) / (2 * N), N, oo),
    lambda: limit(sqrt(X**2 + 6 * X) - X, X, oo),
    lambda: Matrix([[2, 1, 0], [1, 2, 1], [0, 1, 2]]).det(),
    lambda: max(Matrix([[4, 1], [2, 3]]).eigenvals()),
    lambda: Matrix(3, 3, range(1, 10)).rank(),
    lambda: (Matrix([[1, 1], [1, 0]]) ** 5).trace(),
    lambda: sum(1 for i in range(4) for j in range(i, 4)) - 1,
    lambda: sum(ilcm(12 // gcd(a, 12), 6 // gcd(b, 6)) == 6 for a in range(12) for b in range(6)),
    lambda: im(expand((1 + I) ** 10)),
    lambda: residue(exp(X) / X**4, X, 0),
    lambda: sum(12 * x % 18 == 0 for x in range(18)),
]


@pytest.fixture(scope="module")
def problems():
    return load_problems()


def test_sample_has_the_schema_of_deepmath(problems):
    assert len(problems) == len(ANSWERS) == 64
    assert problems.features == FEATURES
    assert len(set(problems["question"])) == 64
    assert len({topic.split(" -> ")[1] for topic in problems["topic"]}) >= 8
    assert all(topic.startswith("Mathematics -> ") for topic in problems["topic"])
    assert min(problems["difficulty"]) < 2 and max(problems["difficulty"]) > 5


@pytest.mark.parametrize("index", range(64))
def test_answer_is_right_and_every_solution_reaches_it(problems, index):
    problem = problems[index]
    answer = parse(f"${problem['final_answer']}$")
    assert answer, f"math-verify cannot read {problem['final_answer']!r}"
    assert simplify(answer[0] - sympify(ANSWERS[index]())) == 0, problem["question"]
    for column in ("r1_solution_1", "r1_solution_2", "r1_solution_3"):
        assert verify(answer, parse(problem[column])), (problem["question"], column)
    assert not verify(answer, parse(f"${latex(answer[0] + 1)}$"))


def test_a_missing_column_is_named(tmp_path):
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:2]]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "topic"}) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"problems\.jsonl has no column topic; it has question, final_answer"):
        load_problems(path)


def test_other_columns_are_left_out(tmp_path):
    row = json.loads(SAMPLE.read_text().splitlines()[0]) | {"difficulty": 4, "source": "elsewhere"}
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert load_problems(path).features == FEATURES


def files(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def test_tiny_moe_is_the_same_for_the_same_seed(tmp_path):
    first = files(make_tiny_moe(tmp_path / "a", seed=1))
    assert files(make_tiny_moe(tmp_path / "b", seed=1)) == first
    assert files(make_tiny_moe(tmp_path / "c", seed=2))["model.safetensors"] != first["model.safetensors"]


def test_tiny_moe_loads_and_generates(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = make_tiny_moe(tmp_path / "model", layers=2, experts=4, head_dim=32)
    config = AutoConfig.from_pretrained(path)
    assert (config.model_type, config.num_experts, config.head_dim) == ("qwen3_moe", 4, 32)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer("What is 2 + 2?").input_ids])
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
    assert len(set(greedy[ids.shape[1] :])) > 1
    # The experts matter: without the first layer's the greedy tokens are others.
    model.model.layers[0].mlp.experts.down_proj.data.zero_()
    assert model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist() != greedy


@pytest.mark.parametrize("text", ["Find $x^2$.", "  two  spaces\n", "π ≤ ∞ 数学 🙂", ""])
def test_byte_tokenizer_is_one_token_a_byte_and_back(text):
    tokenizer = byte_tokenizer(4096)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id] == [256]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"top_k": 9}, "top_k must be between 1 and experts=8, got 9"),
        ({"kv_heads": 3}, "q_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"vocab_size": 256}, "at least 257, got 256"),
    ],
)
def test_tiny_moe_refuses_what_does_not_fit(tmp_path, shape, message):
    with pytest.raises(ValueError, match=message):
        make_tiny_moe(tmp_path / "model", **shape)
    assert not list(tmp_path.iterdir())
