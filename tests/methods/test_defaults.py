"""The methods' defaults are the values of their sources, each with the place where it stands.

A default that is changed fails here, and with it the table of docs/comparison.md is to be changed, or the source read
again. Where a default is ours by intent the reason stands in its place.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from torch import nn

import spartan
from spartan import constant, cubic, linear
from spartan.methods import as_method
from spartan.problem.schedules import delayed
from spartan.solvers.forms import Where

# value, and repository, file and option it comes from; or why it is ours
Source = dict[str, tuple[Any, str]]
RIGL = "google-research/rigl, rigl/cifar_resnet/resnet_train_eval.py"
ACDC = "IST-DASLab/ACDC, configs/neurips/iht_imagenet_resnet50_insta_cosinelr_s90_ep100.yaml"
PROBMASK = "x-zho14/ProbMask-official"
MOVEMENT = "huggingface/block_movement_pruning, README.md: masked_run_squad.py --pruning_method topK"
FEATHER = "athglentis/feather, sparse_utils.py"
ST3 = "vanderschuea/stthree, configs/imagenet.toml"
SVITE = "VITA-Group/SViTE, SViTE"
PAPER = 'the Spartan paper, "Training schedule": warm-up over the first 20% of epochs, finetuning over the last 20%'
OURS = "no source: this library's"

SPARTAN_PHASES: Source = {
    "warmup": (0.2, PAPER),
    "finetune": (0.2, PAPER),
    "budget": ("global", "the Spartan paper: one budget over the whole model"),
}
FROM_THE_START: Source = {
    "budget": ("erk", "google-research/rigl, README.md: --mask_init_method=erdos_renyi_kernel"),
    "warmup": (0.0, f"{RIGL}: masks are sparse from maskupdate_begin_step=0 on"),
}

SOURCES: dict[str, Source] = {
    "acdc": {
        "first_dense": (10 / 100, f"{ACDC}: pruner_1.epochs[0] of 100"),
        "phase": (5 / 100, f"{ACDC}: pruner_1.epochs [10, 10, …], recycler_1.epochs [15, 10, …]"),
        "last_dense": (10 / 100, f"{ACDC}: recycler_2.epochs[0]=75 to pruner_2.epochs[0]=85"),
        "finetune": (15 / 100, f"{ACDC}: pruner_2.epochs[0]=85 to the end"),
        "reset_momentum": (True, "IST-DASLab/ACDC, run_*.sh: --reset_momentum_after_recycling"),
        "warmup": (0.0, f"{ACDC}: initial_sparsity is target_sparsity"),
        "budget": ("global", f"{ACDC}: UnstructuredMagnitudePruner has one threshold for all modules"),
    },
    "dense": {},
    "feather": {
        "p": (3.0, f"{FEATHER}: Feather_aux.forward, p = 3"),
        "pruned_gradient": (None, f"{FEATHER}: get_theta(final_rate)"),
        "ramp": (cubic(0.0, 1.0), f"{FEATHER}: pruning_scheduler"),
        "warmup": (0.5, f"{FEATHER}: pruning_scheduler, t2 = 0.5 · ntotalsteps"),
        "finetune": (0.0, f"{FEATHER}: update_thresh at every step to the end"),
        "budget": ("global", f"{FEATHER}: get_global_thresh"),
    },
    "fixed": {"finetune": (1.0, OURS), "warmup": (0.0, OURS)},
    "gradual": {
        "ramp": (cubic(0.0, 1.0), "Zhu & Gupta 2018, equation 1: s_t = s_f + (s_i − s_f)(1 − (t − t₀)/nΔt)³"),
        "warmup": (0.5, OURS),
        "finetune": (0.3, OURS),
    },
    "imp": {"ramp": (linear(0.0, 1.0), PAPER), **SPARTAN_PHASES},
    "paced": {
        "exchange": (0.22, f"{OURS}, docs/paced.md"),
        "leak": (1.0, f"{OURS}, docs/paced.md"),
        "p": (3.0, f"{FEATHER}: Feather_aux.forward, p = 3"),
        "ramp": (cubic(0.0, 1.0), f"{FEATHER}: pruning_scheduler"),
        "warmup": (0.5, f"{FEATHER}: pruning_scheduler, t2 = 0.5 · ntotalsteps"),
        "finetune": (0.0, f"{FEATHER}: update_thresh at every step to the end"),
        "budget": ("global", f"{FEATHER}: get_global_thresh"),
    },
    "movement": {
        "score_lr": (1e-2, f"{MOVEMENT}: --mask_scores_learning_rate"),
        "ramp": (
            delayed(cubic(0.0, 1.0), 0.125),
            f"{MOVEMENT}: schedule_threshold, --initial_warmup 1 of --warmup_steps 5400, about a tenth of 10 epochs",
        ),
        "warmup": (0.8, f"{MOVEMENT}: --final_warmup 2 of --warmup_steps 5400, about the last two tenths"),
        "finetune": (0.0, f"{MOVEMENT}: scores learn to the end"),
        "budget": ("uniform", "huggingface/block_movement_pruning, emmental/modules/binarizer.py: TopKBinarizer"),
        "learned_options": ({"weight_decay": 0.0, "lr": 1e-2}, "masked_run_squad.py: the first parameter group"),
    },
    "optg": {
        "epochs": (100, "zyxxmu/OptG, configs/resnet50.yaml: epochs"),
        "steepness": (1.0, "zyxxmu/OptG, configs/resnet50.yaml: beta"),
        "warmup": (1.0, "zyxxmu/OptG, imagenet.py: sigmoid(epoch - args.epochs / 2, args.beta)"),
        "finetune": (0.0, "zyxxmu/OptG, imagenet.py: set_model at every epoch"),
        "learned_options": ({"weight_decay": 0.0}, "zyxxmu/OptG, imagenet.py: get_optimizer"),
        "budget": ("global", "zyxxmu/OptG, imagenet.py: set_model"),
    },
    "powerprop": {
        "method": (spartan.TopKAST(), "Schwarz et al. 2021, Sec. 5: Powerprop. + Top-KAST"),
        "alpha": (2.0, "deepmind-research, powerpropagation.ipynb: alphas, the first that is not the baseline"),
    },
    "probmask": {
        "samples": (2, f"{PROBMASK}, args.py: --K"),
        "clip": (3.0, f"{PROBMASK}, trainers/default.py: clip_grad_norm_(model.parameters(), 3)"),
        "score_lr": (None, f"ours for short runs; else {PROBMASK}, args.py: --lr 6e-3, as test_probmask.py says"),
        "temperature": (
            linear(1.0, 0.03),
            f"{PROBMASK}, main.py: args.T = 1 / ((1 - 0.03) · (1 - epoch/epochs) + 0.03)",
        ),
        "hold": (48 / 180, f"{PROBMASK}, args.py: --ts 0.16 and --te 0.6 of 300 epochs"),
        "warmup": (180 / 320, f"{PROBMASK}, args.py: --te 0.6 of 300 epochs, and 20 more"),
        "finetune": (20 / 320, f"{PROBMASK}, main.py: for epoch in range(0, 20)"),
        "budget": ("global", f"{PROBMASK}, utils/net_utils.py: solve_v_total"),
    },
    "rigl": {
        "every": (100, f"{RIGL}: maskupdate_frequency"),
        "fraction": (0.3, f"{RIGL}: drop_fraction"),
        "finetune": (round(1 - 75_000 / 97_656, 3), f"{RIGL}: maskupdate_end_step of max_steps"),
        **FROM_THE_START,
    },
    "set": {
        "every": (100, f"{RIGL}: maskupdate_frequency"),
        "fraction": (
            0.3,
            f"{RIGL}: drop_fraction; ζ = 0.3 in dcmocanu/sparse-evolutionary-artificial-neural-networks too",
        ),
        "finetune": (round(1 - 75_000 / 97_656, 3), f"{RIGL}: maskupdate_end_step of max_steps"),
        **FROM_THE_START,
    },
    "spartan": {
        "beta": (linear(1.0, 10.0), "the Spartan paper's table of ResNet-50's hyperparameters: β_max = 10, from 1"),
        "project": (True, "the Spartan paper's Algorithm 3"),
        "scale_beta": (True, "the Spartan paper: β_max · √(h·w) with blocks"),
        "solver": ("newton", OURS),
        "init": (None, OURS),
        **SPARTAN_PHASES,
    },
    "spartan-learned": {
        "beta": (linear(1.0, 10.0), OURS),
        "scale_beta": (True, OURS),
        "relative": (True, OURS),
        "learned_options": ({"weight_decay": 0.0}, OURS),
        **SPARTAN_PHASES,
    },
    "srste": {
        "decay": (2e-4, "NM-sparsity/NM-sparsity, devkit/sparse_ops/sparse_ops.py: Sparse_NHWC.forward(decay)"),
        "warmup": (0.0, "NM-sparsity/NM-sparsity, devkit/sparse_ops/sparse_ops.py: N of M from the first step on"),
        "finetune": (0.0, "NM-sparsity/NM-sparsity, devkit/sparse_ops/sparse_ops.py: masks move to the end"),
        "budget": ("global", "ours, without N:M"),
    },
    "st3": {
        "rescale": (True, f"{ST3}: conv.rescale, fc.rescale"),
        "sigma": (False, f"{ST3}: pruning_criterion = 'l1'"),
        "ramp": (delayed(cubic(0.0, 1.0), 0.1), f"{ST3}: start_epoch = 5, end_epoch = 50, power = 3"),
        "warmup": (50 / 100, f"{ST3}: end_epoch of n_epochs"),
        "finetune": (0.0, f"{ST3}: fix_from is None"),
        "budget": ("global", "vanderschuea/stthree, stthree/trainmodules/pruning.py: l1"),
    },
    "static": {**FROM_THE_START, "finetune": (0.25, "nothing changes there: a mask that never does")},
    "str": {
        "exact": (True, OURS),
        "init": (-5.0, "ours: the −3200 of RAIVNLab/STR, configs/largescale/resnet50-str.yaml, needs its 100 epochs"),
        "decay": (None, "RAIVNLab/STR, args.py: --st-decay None, which is --wd"),
        "learned_options": ({}, "ours, for the exact form"),
        **SPARTAN_PHASES,
    },
    "svite": {
        "every": (
            None,
            f"{SVITE}/cmd/vm/0426: --update_frequency 15000 of some 1.5 million, 7000 of 750,000: a hundredth",
        ),
        "fraction": (0.5, f"{SVITE}/dst_utils/core.py: --death-rate"),
        "importance": (None, f"{SVITE}/dst_utils/core.py: --death magnitude; grad_scores for heads"),
        "finetune": (1 - 0.8, f"{SVITE}/main.py: --t_end"),
        "warmup": (0.0, f"{SVITE}/dst_utils/core.py: init"),
        "budget": ("erk", f"{SVITE}/cmd/vm/0426: --sparse_init fixed_ERK"),
    },
    "topkast": {
        "backward_sparsity": (0.0, "Jayakumar et al. 2020: the best is a dense backward; so has the Spartan paper"),
        "exploration": (0.0, "the Spartan paper's Algorithm 2 has none"),
        "every": (1, "the Spartan paper's Algorithm 2"),
        **SPARTAN_PHASES,
    },
}


@pytest.mark.parametrize("name", [entry.name for entry in spartan.methods()])
def test_defaults_are_those_of_the_sources(name: str) -> None:
    method, source = as_method(name), SOURCES[name]
    assert {field.name for field in fields(method)} <= set(source), "every argument has a default with a source"  # type: ignore[arg-type]
    for key, (value, where) in source.items():
        found = getattr(method, key)
        assert found == (pytest.approx(value, abs=1e-12) if isinstance(value, float) else value), f"{key}: {where}"


def test_strs_published_form_has_no_phases() -> None:
    """RAIVNLab/STR: thresholds learn and decay with the weights (main.py, get_optimizer) from the first step to the last."""
    method = as_method("str", {"exact": False})
    assert (method.warmup, method.finetune, method.ramp) == (0.0, 0.0, constant(0.0))
    assert method.learned_options == {"weight_decay": None}


@pytest.mark.parametrize(
    ("sparsity", "budget", "count", "kappa"),
    [
        (0.95, "global", "targets", 1.0),
        (0.95, "global", "model", 1.0),  # of the targets that is more
        (0.95, "erk", "targets", 1.0),  # of some layers too
        (0.951, "global", "targets", 0.5),
        (0.96, "erk", "model", 0.5),
        (0.5, {"0.*": 0.99, "2.*": 0.92}, "targets", 0.5),  # 95.5% of both
        (0.5, {"0.*": 0.99, "2.*": 0.9}, "targets", 1.0),
    ],
)
def test_feathers_factor_goes_by_the_whole_sparsity(sparsity: float, budget: Any, count: str, kappa: float) -> None:
    """athglentis/feather, sparse_utils.py, get_theta: 0.5 above 95% of all weights, however layers divide it."""
    model = nn.Sequential(nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 60))
    method = as_method("feather")
    sparsifier = spartan.Sparsifier(model, sparsity, 10, method, budget=budget, count=count)
    (solver,) = sparsifier._run.weights.solving
    form = method.form(solver, sparsifier._run.at)
    assert form.back == Where(1.0, kappa, kappa)
