"""The sampler: the probabilities of what is kept, seeds, log-probabilities, broken logits."""

import pytest
import torch

from trifocal.errors import UserError
from trifocal.inference.sampler import NO_TOKEN, Sampling, SamplingTensors, draw, penalised, pick, uniform, weights_of

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def settings_of(samplings, vocab_size, seen=None):
    settings = SamplingTensors.empty(len(samplings), vocab_size, torch.device("cpu"))
    for row, sampling in enumerate(samplings):
        settings.set_row(row, sampling, torch.tensor(seen[row] if seen else [], dtype=torch.int64))
    return settings


def probabilities(logits=LOGITS, seen=(), **options):
    sampling = Sampling(**options)
    settings = settings_of([sampling], len(logits), [list(seen)])
    found = []
    for filtered in {sampling.filters, True}:
        weights = weights_of(penalised(logits[None], settings), settings, filtered=filtered)[0].double()
        found.append(weights / weights.sum())
    assert torch.equal(found[0], found[-1]), "without filters both ways draw the same"
    return found[0].float()


def drawn(logits, position=0, **options):
    sampling = Sampling(**options)
    settings = settings_of([sampling], len(logits))
    return int(draw(logits[None], settings, torch.tensor([position]), filtered=sampling.filters)[0])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        # Probabilities .64 .24 .09 .03 .01 in the order 1 3 2 0 4.
        ({"top_p": 0.7}, [1, 3]),
        ({"top_p": 0.9}, [1, 2, 3]),
        ({"top_p": 0.0}, [1]),
        # Two of the three that top-k keeps reach 0.8 together.
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),
        ({"min_p": 0.1}, [1, 2, 3]),
        ({"top_k": 2, "min_p": 0.1}, [1, 3]),
    ],
)
def test_what_is_kept_keeps_its_proportions(options, kept):
    expected = torch.zeros(5)
    expected[kept] = LOGITS[kept].softmax(-1)
    torch.testing.assert_close(probabilities(**options), expected, rtol=0, atol=1e-7)


def test_no_token_is_kept_beyond_those_that_reach_top_p_exactly():
    assert probabilities(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_divides_logits(temperature):
    torch.testing.assert_close(probabilities(temperature=temperature), (LOGITS / temperature).softmax(-1))


def test_the_penalty_lowers_what_the_sequence_has():
    expected = torch.tensor([0.0, 1.5, 1.0, 2.0, -2.0]).softmax(-1)
    torch.testing.assert_close(probabilities(seen=(0, 1, 4), repetition_penalty=2.0), expected)
    torch.testing.assert_close(probabilities(seen=(0, 1, 4)), LOGITS.softmax(-1))


def test_settings_are_those_given_then_the_models_then_the_default():
    of_model = {"temperature": 0.6, "top_k": 5, "eos_token_id": [1, 2]}
    assert Sampling.of(of_model, seed=3, top_k="auto", top_p=0.5) == Sampling(
        temperature=0.6, top_k=5, top_p=0.5, seed=3
    )
    assert Sampling.of({}, default_temperature=0.8, temperature="auto") == Sampling(temperature=0.8)
    assert Sampling.of(of_model, temperature=0).temperature == 0
    for name, value in (("temperature", "hot"), ("top_p", 2), ("top_k", -1)):
        with pytest.raises(UserError, match=r"^generation_config\.json of the model: .*; correct it there$"):
            Sampling.of({name: value})
    with pytest.raises(ValueError, match="top_p must be from 0 to 1, got 2") as refused:
        Sampling.of({}, top_p=2)
    assert not isinstance(refused.value, UserError)


def test_a_drawn_token_is_penalised_from_then_on():
    settings = settings_of([Sampling(temperature=0, repetition_penalty=2.0)], 5, [[]])
    order = [int(draw(LOGITS[None], settings, torch.tensor([t]), filtered=False)[0]) for t in range(3)]
    # 3.0 becomes 1.5, under 2.0; 2.0 becomes 1.0, under 1.5.
    assert order == [1, 3, 1]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-46, "top_k": 1}])
def test_top_1_takes_the_lowest_of_equal_ones(options):
    # A vocabulary long enough for a sort that keeps no order.
    logits = torch.zeros(1000)
    logits[[700, 300, 999]] = 2.0
    assert {drawn(logits, position, **options) for position in range(50)} == {300}


@pytest.mark.parametrize("k", [2, 3, 5])
def test_top_k_keeps_exactly_k_of_equal_ones(k):
    logits = torch.zeros(1000)
    logits[400] = 0.5
    assert probabilities(logits, top_k=k).nonzero().flatten().tolist() == [*range(k - 1), 400]


@pytest.mark.parametrize("temperature", [1e-38, 1e-40, 1e-46, 1e-320])
def test_no_temperature_is_too_low(temperature):
    assert {drawn(LOGITS, position, temperature=temperature) for position in range(20)} == {1}
    assert drawn(LOGITS, temperature=temperature, top_k=3, top_p=0.5) == 1


def test_a_token_is_picked_in_proportion_to_its_weight():
    weights = torch.tensor([3, 0, 5, 2, 0])
    u = (torch.arange(1000) + 0.5) / 1000
    found = pick(weights.expand(1000, -1), u.double())
    assert torch.bincount(found, minlength=5).tolist() == [300, 0, 500, 200, 0]
    # The largest number under 1, times more than fp64 holds exactly.
    heavy = torch.tensor([[0, 2**58 + 1, 0]])
    assert pick(heavy, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [1]


def test_splitmix64_is_the_published_one():
    """The first numbers of the generator whose state is the mixed seed."""
    mask = 2**64 - 1

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        settings = settings_of([Sampling(seed=seed)], 1)
        state = mix(seed)
        for position in range(4):
            state = (state + 0x9E3779B97F4A7C15) & mask
            expected = (mix(state) >> 11) / 2**53
            assert float(uniform(settings.seed, torch.tensor([position]))) == expected


def test_log_probabilities_are_those_of_the_model():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    samplings = [
        Sampling(seed=3),
        Sampling(temperature=0),
        Sampling(temperature=2.0, top_k=5),
        Sampling(repetition_penalty=3.0),
    ]
    settings = settings_of(samplings, 300, [[], [], [], list(range(300))])
    tokens, log_p = draw(logits, settings, torch.arange(4), filtered=True)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_p, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_no_token_and_change_no_other(broken):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    settings = [settings_of([Sampling(seed=i, top_k=9) for i in range(3)], 50) for _ in range(2)]
    expected = draw(logits, settings[0], torch.arange(3), filtered=True)
    logits[1, 7] = broken
    tokens, log_p = draw(logits, settings[1], torch.arange(3), filtered=True)
    assert tokens[1] == NO_TOKEN and log_p[1].isnan()
    for given, wanted in zip((tokens, log_p), expected, strict=True):
        assert torch.equal(given[[0, 2]], wanted[[0, 2]])


def test_rows_are_moved_whole():
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.2, repetition_penalty=2.0, seed=2**64 - 3)
    settings = settings_of([Sampling(), sampling], 5, [[], [1, 2]])
    settings.copy_row(1, 0)
    for name, x in vars(settings).items():
        assert torch.equal(x[0], x[1]), name
    assert settings.seen[0].tolist() == [False, True, True, False, False] and int(settings.seed[0]) == -3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"min_p": "0.1"}, "min_p must be a number, got '0.1'"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, got 1.5"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be from"),
        ({"seed": 2**64}, "seed may be at most"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(("options", "same"), [({"top_k": 2**40}, {}), ({"temperature": 1e300}, {"temperature": 1e38})])
def test_settings_beyond_their_type_are_its_largest(options, same):
    assert [drawn(LOGITS, i, **options) for i in range(50)] == [drawn(LOGITS, i, **same) for i in range(50)]
