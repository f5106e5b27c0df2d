"""Compiles kernels for a Hopper GPU without one: the interpreter takes more than the compiler. Run by test_compiled.py."""

from __future__ import annotations

import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spartan.solvers.triton import (
    drawing,
    gradient,
    joint,
    mailbox,
    nm,
    powers,
    ratios,
    rounds,
    runs,
    slopes,
    spread,
    units,
    weights,
)
from spartan.solvers.triton.search import search
from spartan.solvers.triton.state import CUT, WHOLE_CUT

POINTERS = {
    "factors": "*fp32",
    "units": "*fp32",
    "strides": "*i32",
    "columns": "*i32",
    "numbers": "*fp64",
    "floats": "*fp64",
    "costs": "*fp64",
    "prices": "*fp64",
    "fine_costs": "*fp64",
    "fine_prices": "*fp64",
    "sums": "*fp64",
    "owners": "*i32",
    "kinds": "*i32",
    "counts": "*i32",
    "above": "*i32",
    "segments": "i32",
    "all_floats": "*fp64",
    "out": "*fp64",
    "bad": "*i32",
    "most": "i32",
    "tol": "fp32",
}


def compile_it(kernel: Any, types: Any = None, **constants: Any) -> str:
    """What Triton makes of it before it becomes instructions."""
    return str(made_of(kernel, types, **constants)["ttgir"])


def made_of(kernel: Any, types: Any = None, **constants: Any) -> Any:
    """What Triton makes of it, step by step; some arguments are of other types than their names say."""
    names = [p.name for p in kernel.params]
    if "POWER" in names:
        constants = {"POWER": 1.0, **constants}  # θ itself
    usual = POINTERS | (types or {})
    signature = {name: "constexpr" if name in constants else usual.get(name, "*i64") for name in names}
    if kernel in (weights.take, gradient.check):
        signature["numbers"] = "*i32"  # of targets; those of N:M are β and n
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.asm["ptx"]
    return made.asm


def check_width(kernel: Any, types: Any = None, loads: int = 1, stores: int = 1, **constants: Any) -> None:
    """Of so many tensors at least, weights and gradients move 16 bytes at a time where a piece lies so."""
    names = {p.name for p in kernel.params}
    for dtype in (tl.float32, tl.bfloat16):
        given = {"DTYPE": dtype, "GRAD": dtype, "FINE": 1, "BLOCK": 2048, "segments": None, **constants}
        ptx = made_of(kernel, types, **{name: value for name, value in given.items() if name in names})["ptx"]
        for move, least in (("ld", loads), ("st", stores)):
            moved = re.findall(rf"{move}\.global\S*\.v4\.b32", ptx)
            # A thread has 8 entries of a block.
            assert len(moved) >= least * dtype.primitive_bitwidth // 16, (kernel.__name__, dtype, move, moved)


def check_order(made: str) -> None:
    """Threads that clear counts are not those that read them, where the two lie over the threads in different ways.

    All must have read by then: the interpreter, which has no threads, does not tell.
    """
    reading, cleared = "", 0
    for line in made.splitlines():
        found = re.search(r"tt\.(load|store) .*tensor<\d+x!tt\.ptr<i32>, (#\w+)>", line)
        if "barrier" in line:
            reading = ""
        elif found and found[1] == "load":
            reading = found[2]
        elif found:
            cleared += 1
            assert reading in ("", found[2]), line
    assert cleared


def check_powers() -> None:
    """All that sees a power of θ in its place."""
    kept: dict[str, Any] = {"ranks": None, "masks": None, "KEPT": weights.ABOVE}
    owners, taus = {"segments": "*i32"}, {"segments": "*i32", "taus": "*fp64"}
    for power, dtype in ((2.0, tl.float32), (1.5, tl.bfloat16), (3.0, tl.float16)):
        one: dict[str, Any] = {"POWER": power, "DTYPE": dtype, "BLOCK": 2048}
        both = {**one, "GRAD": dtype}
        compile_it(powers.values, **one)
        compile_it(powers.times_slope, **both)
        for mask in (weights.SOFT, weights.SHRUNK):
            wide = {"scales": None, "rows": None, "MASK": mask, "P": 1.0}
            compile_it(weights.project, owners, **kept, **wide, **one)
        shifted = {
            "masks": None,
            "scales": None,
            "rows": None,
            "KEPT": weights.ABOVE,
            "MASK": weights.SHIFTED,
            "P": 1.0,
        }
        compile_it(weights.project, taus, **shifted, **one)
        compile_it(weights.largest_below, {**owners, "found": "*fp32"}, ranks=None, CUT=CUT, **one)
        compile_it(weights.row_scales, {"scales": "*fp32"}, **one)
        compile_it(gradient.damp, {"owners": "*i32", "by": "*fp64"}, **both)
        compile_it(gradient.pull, owners, ranks=None, **both)
        compile_it(gradient.through_mask, owners, **both)
        compile_it(gradient.through_learned, owners, ADD=True, **both)
        compile_it(gradient.teach, ADD=False, **both)
        compile_it(gradient.pull_on_shift, taus, **both)
        for do in (gradient.TIMES, gradient.DECAY, gradient.PACE):
            by = {"more_masks": None, "scale": None, "MORE": weights.EVERYTHING, "DO": do}
            compile_it(gradient.where, {**owners, "numbers": "*fp32"}, **kept, **by, **both)
        kinds = {"SOFT": True, "ABS": True, "SUM": tl.float32, "COLD": False, "SAMPLED": True}
        compile_it(search, fine_costs=None, fine_prices=None, SEGMENTS=2, ROWS=512, **kinds, **one)


def compile_runs() -> None:
    """The kernels of N:M: by magnitude, by what is stored and by what is learned."""
    no_scales: dict[str, Any] = {"scales": None, "rows": None}
    for m, wide, turned in ((4, True, False), (4, False, True), (7, False, True)):
        lanes = 1 << (m - 1).bit_length()
        tile = {"M": m, "LANES": lanes, "R": 2048 // lanes}
        sides: dict[str, Any] = {**tile, "WIDE": wide, "TURNED": turned, "DTYPE": tl.float32}
        several = {"segments": "*i32", "numbers": "*fp32", "by": "*fp32", "scale": "*fp32", "orders": "*i32"}
        types: dict[str, Any] = {**several, "scales": "*fp32", "rows": "*i32", "lines": "*i32"}
        one = {**sides, "segments": None}
        for kept, mask in (
            (weights.ABOVE, weights.ONE),
            (weights.EVERYTHING, weights.SOFT),
            (weights.ABOVE, weights.SOFT),
        ):
            for ranks in ({"ranks": None}, {}):
                given = {**ranks, **no_scales, "masks": None, "KEPT": kept, "MASK": mask, "P": 1.0}
                compile_it(nm.project, types, PASSES=8, **given, **one)
        shrunk: dict[str, Any] = {
            "ranks": None,
            "masks": None,
            "KEPT": weights.ABOVE,
            "MASK": weights.SHRUNK,
            "PASSES": 8,
        }
        compile_it(nm.project, types, P=2.5, **shrunk, **no_scales, **sides)
        compile_it(nm.project, types, P=1.0, **shrunk, **sides)
        stored: dict[str, Any] = {"ranks": None, "KEPT": weights.STORED, "MASK": weights.ONE, "P": 1.0, "PASSES": 8}
        compile_it(nm.project, types, **stored, **no_scales, **sides)
        compile_it(nm.through_mask, types, ranks=None, learned=None, ADD=False, GRAD=tl.float32, PASSES=8, **one)
        for add in (False, True):
            compile_it(nm.through_mask, types, ADD=add, GRAD=tl.bfloat16, PASSES=8, **sides)
        plain: dict[str, Any] = {"ranks": None, "masks": None, "more_masks": None, "scale": None, "GRAD": tl.bfloat16}
        compile_it(nm.where, types, KEPT=weights.ABOVE, MORE=weights.EVERYTHING, DO=gradient.TIMES, **plain, **one)
        compile_it(nm.where, types, KEPT=weights.ABOVE, MORE=weights.ABOVE, DO=gradient.DECAY, **plain, **sides)
        compile_it(nm.where, types, KEPT=weights.ABOVE, MORE=weights.EVERYTHING, DO=gradient.PACE, **plain, **sides)
        both: dict[str, Any] = {"ranks": None, "KEPT": weights.STORED, "MORE": weights.STORED, "GRAD": tl.float32}
        compile_it(nm.where, types, DO=gradient.DECAY, **both, **sides)
        learned = {"masks": None, "more_masks": None, "scale": None, "KEPT": weights.ABOVE, "MORE": weights.EVERYTHING}
        compile_it(nm.where, types, DO=gradient.TIMES, GRAD=tl.float32, **learned, **sides)
        compile_it(runs.scores, types, **sides)
        compile_it(runs.products, types, GRAD=tl.bfloat16, **sides)
        compile_it(runs.restart, types, **sides)
        compile_it(runs.keep, {"ranks": "*fp32", "masks": "*i8", "n": "i32", "runs": "i32"}, **tile)
        compile_it(runs.row_scales, types, DTYPE=tl.bfloat16, **tile)


def compile_units() -> None:
    """The kernels of blocks, rows and columns."""
    kinds: dict[str, Any] = {"GRAD": tl.float32, "DTYPE": tl.float32}
    tile: dict[str, Any] = {"INLINE": True, "GRAIN": 8, "U": 128, "W": 16}
    one, apart = {**tile, "segments": None}, {**tile, "INLINE": False, "GRAIN": 1}
    types: dict[str, Any] = {
        **dict.fromkeys(("segments", "shapes"), "*i32"),
        **dict.fromkeys(("pulls", "numbers", "scale", "scales"), "*fp32"),
        **dict.fromkeys(("taus", "more_values"), "*fp64"),
    }
    compile_it(units.pull, types, **kinds, **one)
    compile_it(units.through_mask, types, **kinds, **one)
    compile_it(units.through_mask, types, **kinds, **apart)
    compile_it(units.sum_units, types, DTYPE=tl.float32, **tile)
    nothing: dict[str, Any] = {"ranks": None, "masks": None, "scales": None, "bands": None, "P": 1.0}
    above: dict[str, Any] = {**nothing, "KEPT": weights.ABOVE}
    alone: dict[str, Any] = {
        "ranks": None,
        "masks": None,
        "more_masks": None,
        "scale": None,
        "MORE": weights.EVERYTHING,
    }
    for mask in (weights.ONE, weights.SOFT, weights.SHRUNK):
        check_width(spread.project, types, **above, MASK=mask, **one)
    for do in (gradient.TIMES, gradient.DECAY, gradient.PACE):
        check_width(spread.where, types, **alone, KEPT=weights.ABOVE, DO=do, **one)
    check_width(units.through_mask, types, loads=2, **one)
    for other in (tile, apart):
        unprojected = {**nothing, "KEPT": weights.EVERYTHING, "MASK": weights.SOFT}
        compile_it(spread.project, types, DTYPE=tl.bfloat16, **unprojected, **other)
        numbers = {"ranks": None, "scales": None, "bands": None, "KEPT": weights.EVERYTHING, "MASK": weights.NUMBERS}
        compile_it(spread.project, types, DTYPE=tl.bfloat16, P=1.0, **numbers, **other)
        stored = {"ranks": None, "scales": None, "bands": None, "KEPT": weights.STORED, "MASK": weights.ONE}
        compile_it(spread.project, types, DTYPE=tl.bfloat16, P=1.0, **stored, **other)
        shrunk = {"ranks": None, "masks": None, "KEPT": weights.ABOVE, "MASK": weights.SHRUNK}
        compile_it(spread.project, types, DTYPE=tl.bfloat16, P=2.5, **shrunk, **other)
        for mask in (weights.ONE, weights.SOFT, weights.SHIFTED):
            ranked = {key: value for key, value in above.items() if key != "ranks"}
            compile_it(spread.project, types, DTYPE=tl.bfloat16, MASK=mask, **ranked, **other)
        both: dict[str, Any] = {"masks": None, "more_masks": None, "scale": None, "KEPT": weights.ABOVE}
        compile_it(spread.where, types, MORE=weights.ABOVE, DO=gradient.TIMES, **both, **kinds, **other)
        compile_it(spread.where, types, ranks=None, MORE=weights.ABOVE, DO=gradient.DECAY, **both, **kinds, **other)
        kept = {"ranks": None, "KEPT": weights.STORED, "MORE": weights.STORED}
        for do in (gradient.TIMES, gradient.DECAY, gradient.PACE):
            compile_it(spread.where, types, DO=do, **kept, **kinds, **other)
        without: dict[str, Any] = {"shares": None, "bands": None}
        for shares in (without, {}):
            typed = {**types, "shares": "*fp32"}
            compile_it(spread.along, typed, ranks=None, masks=None, KEPT=weights.ABOVE, **shares, **kinds, **other)
        compile_it(spread.times_mask, types, masks=None, MASK=weights.SOFT, GRAD=tl.bfloat16, **other)
        compile_it(spread.times_mask, types, ranks=None, MASK=weights.NUMBERS, GRAD=tl.bfloat16, **other)
        compile_it(spread.bend, {**types, "masks": "*fp32", "slopes": "*fp32"}, **kinds, **other)
        compile_it(spread.restart, types, DTYPE=tl.bfloat16, **other)
        compile_it(spread.sum_products, {**types, "sums": "*i64"}, **kinds, **other)
    for add in (False, True):
        compile_it(slopes.learn, types, ADD=add, BLOCK=2048)
    compile_it(slopes.of_shifted, {**types, "masks": "*fp32"}, BLOCK=2048)
    for inline in (False, True):
        compile_it(slopes.row_scales, types, DTYPE=tl.float32, INLINE=inline, BLOCK=1024)
        lengths = {**types, "by": "*fp64", "lengths": "*fp32"}
        compile_it(slopes.row_lengths, lengths, DTYPE=tl.bfloat16, INLINE=inline, BLOCK=1024)
    shares = {"lengths": "*fp32", "by": "*fp64", "shares": "*fp32"}
    compile_it(slopes.band_shares, shares, ROWS=512)
    compile_it(slopes.band_scales, {"scales": "*fp32", "found": "*fp32"}, ROWS=512)


if __name__ == "__main__":
    check_powers()
    compile_runs()
    compile_units()
    check_width(weights.put)
    check_width(weights.take)
    check_width(gradient.through_mask, loads=2)
    check_width(gradient.check, stores=0)
    check_width(gradient.clear, loads=0)
    check_width(gradient.pull, loads=2, stores=0, ranks=None)
    check_width(powers.values, POWER=2.0)
    check_width(powers.times_slope, loads=2, POWER=2.0)
    nothing: dict[str, Any] = {"ranks": None, "masks": None}
    for mask in (weights.ONE, weights.SOFT, weights.SHRUNK):
        check_width(weights.project, **nothing, scales=None, rows=None, KEPT=weights.ABOVE, MASK=mask, P=3.0)
    for do in (gradient.TIMES, gradient.DECAY, gradient.PACE):
        alone: dict[str, Any] = {
            **nothing,
            "more_masks": None,
            "scale": None,
            "KEPT": weights.ABOVE,
            "MORE": weights.EVERYTHING,
        }
        check_width(gradient.where, loads=2, **alone, DO=do)
    several: dict[str, Any] = {"GRAD": tl.float32, "DTYPE": tl.float32, "BLOCK": 2048}
    owners: dict[str, Any] = {"segments": "*i32"}
    compile_it(gradient.pull, owners, **several)
    compile_it(gradient.through_learned, owners, ADD=True, **several)
    compile_it(gradient.times_mask, GRAD=tl.bfloat16, BLOCK=2048)
    compile_it(gradient.where_stored, GRAD=tl.bfloat16, BLOCK=2048)
    compile_it(gradient.teach, ADD=False, **several)
    stored: dict[str, Any] = {
        "ranks": None,
        "KEPT": weights.STORED,
        "MORE": weights.STORED,
        "DO": gradient.DECAY,
    }
    compile_it(gradient.where, {**owners, "numbers": "*fp32", "scale": "*fp32"}, **stored, **several)
    both: dict[str, Any] = {
        "masks": None,
        "more_masks": None,
        "scale": None,
        "KEPT": weights.ABOVE,
        "MORE": weights.ABOVE,
    }
    compile_it(
        gradient.where,
        {**owners, "numbers": "*fp32", "more_values": "*fp64"},
        **both,
        DO=gradient.TIMES,
        **several,
    )
    kinds: dict[str, Any] = {"DTYPE": tl.bfloat16, "BLOCK": 2048}
    numbers: dict[str, Any] = {
        "ranks": None,
        "scales": None,
        "rows": None,
        "KEPT": weights.EVERYTHING,
        "MASK": weights.NUMBERS,
        "P": 1.0,
    }
    compile_it(weights.project, owners, **numbers, **kinds)
    shrunk: dict[str, Any] = {"ranks": None, "masks": None, "KEPT": weights.ABOVE, "MASK": weights.SHRUNK, "P": 1.0}
    compile_it(weights.project, {**owners, "taus": "*fp64", "scales": "*fp32"}, **shrunk, **kinds)
    learned: dict[str, Any] = {
        "masks": None,
        "scales": None,
        "rows": None,
        "KEPT": weights.ABOVE,
        "MASK": weights.SOFT,
        "P": 1.0,
    }
    compile_it(weights.project, owners, **learned, **kinds)
    compile_it(weights.keep, {**owners, "ranks": "*fp32", "masks": "*i8"}, BLOCK=2048)
    compile_it(weights.restart, **kinds)
    compile_it(weights.largest_below, {**owners, "found": "*fp32"}, CUT=CUT, **kinds)
    compile_it(weights.largest_below, {**owners, "found": "*fp32"}, ranks=None, CUT=CUT, **kinds)
    shift: dict[str, Any] = {
        "masks": None,
        "scales": None,
        "rows": None,
        "KEPT": weights.ABOVE,
        "MASK": weights.SHIFTED,
    }
    compile_it(weights.project, {**owners, "taus": "*fp64"}, P=1.0, **shift, **kinds)
    compile_it(gradient.pull_on_shift, {**owners, "taus": "*fp64"}, **several)
    compile_it(gradient.learn_shift, {"shifts": "*fp32", "found": "*fp32"}, ROWS=512)
    compile_it(weights.below, {"found": "*fp32", "taus": "*fp64"}, ROWS=512, CUT=WHOLE_CUT)
    compile_it(weights.row_scales, {"scales": "*fp32"}, DTYPE=tl.float32, BLOCK=1024)
    for dtype in (tl.float32, tl.bfloat16):
        compile_it(gradient.damp, {"by": "*fp64"}, GRAD=dtype, DTYPE=dtype, BLOCK=1024)
    doubles: dict[str, Any] = {**owners, "found": "*fp64", "known": "*fp64", "budgets": "*fp64", "out": "*i64"}
    compile_it(drawing.uniform, {"out": "*fp32", "one": "i32", "two": "i32"}, BLOCK=2048)
    compile_it(drawing.shift_ranks, {"shifts": "*fp32", "out": "*fp32"}, DTYPE=tl.bfloat16, POWER=1.0, BLOCK=2048)
    vectors = dict.fromkeys(("s", "m", "mean", "square", "grad", "new_s", "new_mean", "new_square", "out"), "*fp32")
    singles = dict.fromkeys(("rate", "to_mean", "to_square", "fix_mean", "fix_square", "eps", "beta"), "fp32")
    given: dict[str, Any] = {**vectors, **singles, "n": "i32", "one": "i32", "two": "i32"}
    compile_it(drawing.sample, given, BLOCK=2048)
    compile_it(drawing.sample_gradient, given, POWER=1.0, GRAD=tl.bfloat16, DTYPE=tl.float32, BLOCK=2048)
    compile_it(drawing.adam, given, BLOCK=2048)
    for first in (False, True):
        compile_it(drawing.shifted, doubles, FIRST=first, BLOCK=2048)
        compile_it(drawing.step, doubles, FIRST=first, ROWS=512)
    compile_it(drawing.clip, doubles, BLOCK=2048)
    norms: dict[str, Any] = {"found": "*fp64", "before": "*fp64", "factors": "*fp64", "count": "i32", "most": "fp32"}
    check_width(joint.squares, norms, stores=0)
    check_width(joint.scale, norms)
    compile_it(joint.norm, norms, ROWS=512)
    compile_it(joint.factors_of, norms, ROWS=512)
    sizes = {"BLOCK": 2048, "ROWS": 512}
    for kinds in (
        {"owners": None, "SEGMENTS": 1, "SOFT": True, "ABS": True, "DTYPE": tl.float32, "SUM": tl.float32},
        {"SEGMENTS": 64, "SOFT": True, "ABS": False, "DTYPE": tl.float32, "SUM": tl.float64},
        {"SEGMENTS": 2, "SOFT": False, "ABS": True, "DTYPE": tl.bfloat16, "SUM": tl.float32},
    ):
        for fine in ({}, {"fine_costs": None, "fine_prices": None}):
            made = made_of(search, COLD=False, SAMPLED=True, **kinds, **sizes, **fine)
            check_order(made["ttgir"])
            assert re.search(r"ld\.global\S*\.v4\.b32", made["ptx"])
    told: dict[str, Any] = {**owners, "told": "*fp64", "moments": "*fp64", "ends": "*fp64"}
    slots: dict[str, Any] = {"slots": "*fp64", "to": "*fp64", "width": "i32", "columns": "i32", "step": "i32"}
    assert "ld.volatile.global" in made_of(mailbox.fetch, slots, SLOTS=1024, BLOCK=128)["ptx"]
    compile_it(ratios.ratios, ROWS=512)
    compile_it(ratios.tell_pulls, {**told, "counted": "*i32"}, ROWS=512)
    compile_it(ratios.told_ratios, told)
    compile_it(rounds.count_marked, {"masks": "*i8"}, BLOCK=2048)
    compile_it(rounds.begin_cut, {"shift": "i32"})
    compile_it(rounds.cut_here, {"step": "i32", "out": "*i64", "out_step": "i32", "targets": "i32"}, ROWS=64)
    for bins, soft in ((2048, True), (32, True), (2048, False)):
        reading: dict[str, Any] = {"ABS": soft, "DTYPE": tl.float32, "POWER": 1.0, "BLOCK": 2048}
        compile_it(rounds.begin, SOFT=soft, COLD=not soft, SAMPLED=not soft, N=bins)
        compile_it(rounds.read, told, SOFT=soft, SUM=tl.float32, **reading)
        check_order(compile_it(rounds.tell, told, SOFT=soft, ROWS=512, N=bins))
        compile_it(rounds.read_ties, told, FIRST=soft, N=bins, **reading)
        for whole in ({}, {"fine_prices": None}):
            compile_it(rounds.decide_all, told, SOFT=soft, N=bins, **whole)
            compile_it(rounds.narrow_cut, told, BITS=bins.bit_length() - 1, N=bins, **whole)
