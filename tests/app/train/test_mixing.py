import pytest
import torch
from torch import Tensor

from spartan.app.train.mixing import _beta, mix_batch


def mix(mixup: float, cutmix: float, seed: int = 0, size: tuple[int, ...] = (6, 3, 8, 10)) -> tuple[Tensor, Tensor]:
    """Image i is filled with the number i, and its label is i."""
    x = torch.arange(size[0], dtype=torch.float32)[:, None, None, None].expand(size).clone()
    return mix_batch(x, torch.arange(size[0]), size[0], mixup, cutmix, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0), (1e-3, 1e-3)])
def test_targets_are_distributions_over_an_image_and_its_neighbour(mixup: float, cutmix: float) -> None:
    for seed in range(20):
        x, targets = mix(mixup, cutmix, seed)
        assert x.shape == (6, 3, 8, 10)
        assert targets.shape == (6, 6)
        assert x.isfinite().all()
        assert torch.allclose(targets.sum(1), torch.ones(6))
        assert ((targets > 0).sum(1) <= 2).all()
        # Images are constant, so their mean is that of the labels under the targets.
        assert torch.allclose(x.mean((1, 2, 3)), targets @ torch.arange(6.0), atol=1e-5)


def test_a_mixup_image_is_one_weighted_sum() -> None:
    x, targets = mix(0.5, 0.0)
    share = targets[1, 1]
    assert 0 < share < 1
    assert torch.allclose(x[1], share.expand_as(x[1]) * 1.0)  # its neighbour is image 0
    assert torch.allclose(x[0], ((1 - share) * 5).expand_as(x[0]))


def test_a_cutmix_box_has_the_area_of_its_weight() -> None:
    shares = []
    for seed in range(50):
        x, targets = mix(0.0, 1.0, seed)
        box = x[3, 0] == 2
        assert ((x[3] == 2) | (x[3] == 3)).all()
        assert (x[3] == x[3, 0]).all()  # the same box in every channel
        assert targets[3, 2].item() == pytest.approx(box.float().mean().item(), abs=1e-6)
        rows, columns = box.any(1), box.any(0)
        assert (box == rows[:, None] & columns).all()
        for line in (rows, columns):  # and one piece
            assert (line.int().diff() != 0).sum() <= 2
        shares.append(targets[3, 2].item())
    assert max(shares) > 0.5
    assert min(shares) < 0.05


def test_a_coin_picks_one_of_the_two_for_the_whole_batch() -> None:
    boxes = 0
    for seed in range(100):
        x, _ = mix(0.5, 1.0, seed)
        whole = (x % 1 == 0).flatten(1).all(1)
        assert whole[1:].all() or not whole[1:].any()
        boxes += int(whole[1:].all())
    assert 30 < boxes < 70


def test_only_the_generator_counts() -> None:
    first = mix(0.2, 1.0, 7)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = mix(0.2, 1.0, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], mix(0.2, 1.0, seed)[0]) for seed in range(3))


def test_without_mixing_nothing_changes() -> None:
    x, targets = mix(0.0, 0.0)
    assert torch.equal(x.mean((1, 2, 3)), torch.arange(6.0))
    assert torch.equal(targets, torch.eye(6))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_lambda_is_beta_distributed(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([_beta(alpha, generator) for _ in range(2000)])
    assert abs(draws.mean() - 0.5) < 0.03
    assert abs(draws.var() * 4 * (2 * alpha + 1) - 1) < 0.1
