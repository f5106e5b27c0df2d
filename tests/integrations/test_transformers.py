"""`trainer.add_callback(SpartanCallback(sparsity=…))`, in the Trainer of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import spartan
from tests.foreign import library
from tests.integrations.language import KEPT, SPARSITY, STEPS, gpt2, kept, llama, plain_loop, sentences, trainer
from tests.loops.small import same_weights

transformers = library("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


def callback(**settings: Any) -> Any:
    from spartan.integrations.transformers import SpartanCallback

    return SpartanCallback(SPARSITY, **settings)


def trained(folder: Path, resume: Path | None = None, given: Any = None, **options: Any) -> Any:
    found = trainer(folder, **options)
    found.add_callback(callback() if given is None else given)
    found.train(resume_from_checkpoint=None if resume is None else str(resume))
    return found


def matrices(model: Any) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


class TestTheSameRun:
    """Clipping, accumulation and resuming, as a plain loop does them."""

    def test_to_the_bit(self, tmp_path: Path) -> None:
        mine = callback()
        ours = trained(tmp_path, given=mine)
        model, sparsifier = plain_loop()
        sparsifier.finalize()
        assert same_weights(model, ours.model)
        assert mine.sparsifier.stats == sparsifier.stats
        assert kept(model) == KEPT

    @pytest.mark.parametrize("method", ["imp", "topkast"])
    def test_other_methods(self, method: str, tmp_path: Path) -> None:
        ours = trained(tmp_path, given=callback(method=method))
        model, _ = plain_loop(method=method)
        assert same_weights(model, ours.model)

    @pytest.mark.parametrize(("method", "at"), [("spartan", 3), ("rigl", 10), ("spartan", 17)])
    def test_resumed(self, method: str, at: int, tmp_path: Path) -> None:
        """With dropout and shuffled data, whose random numbers the Trainer restores."""
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": at, "ordered": False}
        whole = trained(tmp_path, given=callback(method=method), model=gpt2(0.1), **options)
        options |= {"given": callback(method=method), "model": gpt2(0.1, seed=1)}
        again = trained(tmp_path / "again", tmp_path / f"checkpoint-{at}", **options)
        assert same_weights(whole.model, again.model)
        spartan.verify(again.model, SPARSITY)

    def test_clipping_sees_the_gradient_for_the_dense_weights(self, tmp_path: Path) -> None:
        """The norm that is logged is that of a plain loop, before clipping."""
        ours = trained(tmp_path, logging_strategy="steps", logging_steps=1)
        norms = [row["grad_norm"] for row in ours.state.log_history if "grad_norm" in row]
        model, _sparsifier = plain_loop(steps=12)
        rows = [sentences()[(48 + i) % 64] for i in range(4)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        model(**batch, num_items_in_batch=48).loss.backward()
        expected = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert norms[12] == pytest.approx(float(expected), rel=1e-5)

    def test_dense_is_as_without_us(self, tmp_path: Path) -> None:
        ours, theirs = trained(tmp_path / "a", given=callback(method="dense")), trainer(tmp_path / "b")
        theirs.train()
        assert same_weights(ours.model, theirs.model)

    def test_an_optimizer_and_a_schedule_of_ones_own(self, tmp_path: Path) -> None:
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        found = trained(tmp_path, model=model, optimizers=(optimizer, schedule))
        assert kept(found.model) == KEPT


class TestWays:
    """Precision, compilation, checkpointing of activations."""

    @pytest.mark.parametrize(
        "options",
        [
            {"bf16": True},
            {"gradient_checkpointing": True},
            {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_exact(self, options: dict[str, Any], tmp_path: Path) -> None:
        found = trained(tmp_path, **options)
        assert kept(found.model) == KEPT
        if "bf16" not in options:
            assert same_weights(found.model, plain_loop()[0])

    def test_another_decoder(self, tmp_path: Path) -> None:
        found = trained(tmp_path, model=llama())
        spartan.verify(found.model, SPARSITY)

    def test_a_loss_scaler(self, tmp_path: Path) -> None:
        """As with fp16=True, which takes a GPU: gradients are scaled, unscaled to be clipped, and a step is skipped."""
        found = trainer(tmp_path)
        found.accelerator.native_amp = True
        found.accelerator.state._mixed_precision = "fp16"
        found.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        found.accelerator.autocast_handler = library("accelerate").utils.AutocastKwargs(enabled=False)
        mine = callback()
        found.add_callback(mine)

        class Overflow(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                scaler = found.accelerator.scaler
                if state.global_step == 4:
                    scaler.update(float("inf"))
                elif state.global_step == 5:
                    scaler.update(2.0**10)

        found.add_callback(Overflow())
        found.train()
        assert mine.sparsifier.stats.step == STEPS - 1
        assert kept(found.model) == KEPT


class TestFiles:
    """What is saved holds the zeros, and its own loader gives them back."""

    def test_saved_and_opened(self, tmp_path: Path) -> None:
        found = trained(tmp_path, save_strategy="steps", save_steps=STEPS)
        found.save_model(str(tmp_path / "final"))
        for folder in ("final", f"checkpoint-{STEPS}"):
            opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert same_weights(opened, found.model)
            assert kept(opened) == KEPT
            spartan.verify(opened, SPARSITY)

    def test_packed(self, tmp_path: Path) -> None:
        from spartan.integrations.transformers import PACKED, load_packed, save_packed

        found = trained(tmp_path)
        size = save_packed(found.model, tmp_path / "packed")
        assert (tmp_path / "packed" / PACKED).stat().st_size == size
        with pytest.raises(OSError, match="no file named"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
        assert not list((tmp_path / "packed").glob("*.safetensors"))
        again = load_packed(tmp_path / "packed")
        assert type(again) is type(found.model)
        assert same_weights(again, found.model)
        again.save_pretrained(tmp_path / "ordinary")
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ordinary")
        assert same_weights(opened, found.model)
        with pytest.raises(ValueError, match=r"has no model\.spartan"):
            load_packed(tmp_path / "ordinary")

    def test_trained_on_afterwards(self, tmp_path: Path) -> None:
        """The optimizer has its own step again, and the zeros can be kept by the method that keeps them."""
        found = trained(tmp_path)
        zeros = [p == 0 for p in matrices(found.model)]
        again = trainer(tmp_path / "again", model=found.model)
        again.add_callback(callback(method="fixed"))
        again.train()
        assert all(torch.equal(p == 0, z) for p, z in zip(matrices(again.model), zeros, strict=True))


class TestTheBestModel:
    """`load_best_model_at_end`: only a model that is sparse enough can be the best."""

    options: ClassVar[dict[str, Any]] = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_rank", "greater_is_better": False,
    }  # fmt: skip

    def run(self, folder: Path, best: int, **more: Any) -> Any:
        """A run in which the evaluation at this step is the best of all, then the later the better."""
        mine = callback(method="spartan")
        found = trainer(folder, **(self.options | more))
        found.add_callback(mine)
        measured = found.evaluation_loop

        def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
            output = measured(*args, **kwargs)
            step = found.state.global_step
            output.metrics["eval_rank"] = 0.0 if step == best else 1.0 + abs(step - 12)
            return output

        found.evaluation_loop = evaluation_loop
        return found, mine

    def test_one_that_is_sparse_is_loaded(self, tmp_path: Path) -> None:
        found, mine = self.run(tmp_path, best=12)
        found.train()
        assert found.state.best_model_checkpoint.endswith("checkpoint-12")
        best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
        assert same_weights(best, found.model)
        assert not same_weights(found.model, plain_loop()[0])
        assert kept(found.model) == KEPT
        assert sum(layer.kept for layer in mine.sparsifier.layers()) == KEPT

    def test_one_from_before_the_target_density_does_not_count(self, tmp_path: Path) -> None:
        found, _ = self.run(tmp_path, best=2)
        with pytest.warns(UserWarning, match="at step 2, does not count: the target density is reached at step 4"):
            found.train()
        assert found.state.best_model_checkpoint.endswith("checkpoint-12")
        assert kept(found.model) == KEPT

    def test_one_that_came_in_by_a_checkpoint_of_somebody_elses_is_refused(self, tmp_path: Path) -> None:
        """Recorded where the callback could not see it, and then loaded at the end."""
        found, _ = self.run(tmp_path, best=2)

        class Meddling(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                if state.global_step == STEPS:
                    state.best_model_checkpoint = str(tmp_path / "checkpoint-2")

        found.add_callback(Meddling())
        with pytest.raises(RuntimeError, match=r"checkpoint-2\), which load_best_model_at_end.* holds fewer zeros"):
            found.train()


class TestLogs:
    def test_density_and_beta_reach_everybody(self, tmp_path: Path) -> None:
        """Also those who report, and whose callbacks were there first."""
        seen: list[dict[str, float]] = []

        class Reporter(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
                seen.append(dict(logs))

        found = trained(
            tmp_path,
            given=callback(method="spartan"),  # which has a β
            callbacks=[Reporter()],
            logging_strategy="steps",
            logging_steps=5,
            save_strategy="steps",
            save_steps=20,
        )
        rows = [row for row in found.state.log_history if "loss" in row]
        assert [row["density"] for row in rows] == [row["density"] for row in seen if "loss" in row]
        assert rows[-1]["density"] == pytest.approx(1 - SPARSITY, abs=1e-4)
        assert rows[0]["beta"] < rows[-1]["beta"] == 10.0
        saved = json.loads((tmp_path / "checkpoint-20" / "trainer_state.json").read_text())
        assert saved["log_history"][-1]["density"] == rows[-1]["density"]


class TestRefused:
    def test_optimizers_that_take_no_steps(self, tmp_path: Path) -> None:
        found = trainer(tmp_path)
        found.args.optim = "galore_adamw_layerwise"
        found.optimizer = transformers.trainer_pt_utils.LayerWiseDummyOptimizer(optimizer_dict={})
        found.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(found.optimizer, lambda step: 1.0)
        found.add_callback(callback())
        with pytest.raises(
            ValueError, match="'galore_adamw_layerwise' updates each layer while the backward still runs"
        ):
            found.train()

    def test_lomo(self, tmp_path: Path) -> None:
        found = trainer(tmp_path)
        found.create_optimizer()
        found.args.optim = "adalomo"
        found.add_callback(callback())
        with pytest.raises(ValueError, match="'adalomo' updates weights inside the backward"):
            found.train()

    def test_a_checkpoint_without_our_state(self, tmp_path: Path) -> None:
        found = trainer(tmp_path, save_strategy="steps", save_steps=10)
        found.train()
        with pytest.raises(
            RuntimeError, match="goes on from step 10, but its checkpoint holds no state of a sparsifier"
        ):
            trained(tmp_path / "again", tmp_path / "checkpoint-10")

    def test_a_method_that_learns_parameters(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"method='optg' learns parameters of its own.*no callback is needed"):
            trained(tmp_path, given=callback(method="optg"))

    def test_a_run_that_ends_before_the_target_density(self, tmp_path: Path) -> None:
        found = trainer(tmp_path)

        class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                control.should_training_stop = state.global_step == 2

        found.add_callback(callback(method="spartan"))
        found.add_callback(Stop())
        with pytest.raises(RuntimeError, match="reaches the target density at step 4; train on"):
            found.train()

    def test_unknown_settings(self) -> None:
        with pytest.raises(TypeError, match="'patern' is no setting of a Sparsifier"):
            callback(patern=None)
