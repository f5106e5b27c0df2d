"""Table 8: a budget of 5% of the FLOPs, with two ways to value weights."""

from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.experiments import Experiment, Scale, flop_budget
from spartan.app.paper.judging import listed, verdict
from spartan.app.paper.published import printed
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table, text_of

POWERS = {"v1": 1.0, "v0.5": 0.5}
COLUMNS = {"Accuracy %": "top1", "FLOP %": "flops", "Sparsity %": "achieved_sparsity"}


@register
class FlopPruning(Exhibit):
    """v₁ = c|θ| and v₀.₅ = √c|θ| under the same budget."""

    order = 17
    name = "flop-pruning"
    title = "FLOP-sensitive pruning to 5%: v₁ and v₀.₅"
    where = "Table 8"
    kind = "trained"
    needs = ("top1", "flops", "achieved_sparsity")

    def experiments(self, scale: Scale) -> list[Experiment]:
        """The two values, with the paper's β_max of 10 and 160."""
        return [flop_budget(scale, power) for power in POWERS.values()]

    def show(self, results: Results) -> Shown:
        """Accuracy, FLOPs and sparsity."""
        cells, found = [], {}
        for name, power in POWERS.items():
            cells.append([name])
            for column, key in COLUMNS.items():
                score = results.score(flop_budget(results.scale, power), key)
                found[name, key] = None if score is None else score.mean
                cells[-1] += [text_of(score), text_of(printed("Table 8", name, 100, column))]
        header = ["value", *(word for column in COLUMNS for word in (column, "paper"))]
        table = Table(
            "A budget of 5% of the FLOPs; the paper's are ResNet-50 on ImageNet-1K, 100 epochs", header, cells
        )
        ours = {key: (found["v1", key], found["v0.5", key]) for key in COLUMNS.values()}

        def told(key: str, digits: int = 2) -> str:
            return listed(f"{name} {found[name, key]:.{digits}f}" for name in POWERS if found[name, key] is not None)

        flops, sparsity = ours["flops"], ours["achieved_sparsity"]
        claims = [
            Claim(
                "Both values give the same FLOPs, above 5% by what norms and activations cost",
                "Appendix F",
                verdict([None if None in flops else abs(flops[0] - flops[1]) < 0.01 and min(flops) > 5]),  # type: ignore[type-var,operator]
                f"% of dense: {told('flops', 4)}",
            ),
            Claim(
                "v₀.₅ gives much lower sparsity than v₁",
                "Appendix F",
                verdict([None if None in sparsity else sparsity[0] - sparsity[1] > 1]),  # type: ignore[operator]
                f"sparsity in %: {told('achieved_sparsity')} (the paper: 95.94 and 89.73)",
            ),
        ]
        line = f"here: accuracy: {told('top1')}; sparsity: {told('achieved_sparsity')}. "
        line += "Published: accuracy: 73.88 and 74.13; sparsity: 95.94 and 89.73"
        return Shown(line, [table], None, claims)
