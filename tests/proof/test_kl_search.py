"""How much may be spent for a KL: the secant on plain numbers."""

from dataclasses import replace

import pytest

from calibrate.proof.kl import PASSES, KlTrial, choose_scale, is_close_enough, propose_scale

AIM, MOST = 4e-3, 5e-3


def searched(law, aim=AIM, most=MOST, passes=PASSES):
    """What a search ends with where a scale s gives the KL law(s): the scale, and the passes."""
    done = []
    while len(done) < passes and not is_close_enough(done, aim, most):
        scale = propose_scale(done, aim)
        done.append(KlTrial(scale, aim * scale, law(scale)))
    return choose_scale(done, aim, most), done


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 3.6, 12.0])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.3])
def test_three_passes_find_the_scale(factor, power):
    """Sensitivities may be off by a factor, and the KL need not be linear in what is spent."""

    def law(scale):
        return factor * AIM * scale**power

    scale, passes = searched(law)
    assert law(scale) == pytest.approx(AIM, rel=0.13)
    assert law(scale) <= MOST
    assert passes[0].scale == 1.0
    assert len(passes) == 1 or factor != 1.0


def test_what_is_proven_is_within_the_budget_where_a_pass_was():
    """Of a KL that jumps over the aim, the side below it; where none was below, what the secant says."""
    below, above = KlTrial(0.5, 1.0, 0.4 * AIM), KlTrial(0.6, 1.0, 1.3 * AIM)
    assert above.kl > MOST
    assert choose_scale([below, above], AIM, MOST) == 0.5
    assert not is_close_enough([above], AIM, MOST)
    assert choose_scale([above], AIM, MOST) == pytest.approx(0.6 / 1.3)
    just_above = KlTrial(1.0, 1.0, 0.99 * MOST)
    assert is_close_enough([just_above], 0.9 * MOST, MOST)
    assert not is_close_enough([replace(just_above, kl=1.01 * MOST)], MOST, MOST)
