"""Notes below the tables of a report: what its columns are."""

_BUILTIN = (
    "The built-in records say each thing in several ways, and the built-in questions are about things in the training "
    "data: both measure how well the text is learnt, not what the model makes of new text."
)
_RATE = (
    "*tokens/s*: training tokens without padding, a second, and *padded* with it; the first {} steps are not counted."
)
_COMPILE = (
    "*compile*: the first forward and backward pass, and the first optimizer.step(), less the median of the later ones "
    "(*step*): what is compiled, allocated and loaded once."
)
_SAME = (
    "All optimizers start from the same weights and see the same data in the same order; each runs in a process of its "
    "own."
)


def footnotes(report):
    """What the columns are, for this machine and these options."""
    machine, options = report["machine"] or {}, report["options"]
    counted = "the most memory that tensors took on the GPU during training"
    if not machine.get("gpu"):
        counted = "the largest resident memory of the training process, so Python and its libraries are in it"
    rows = [row["result"] for row in report["rows"] if row["status"] == "ok"]
    skipped = max((result.get("steps_not_timed") or 0 for result in rows), default=0)
    timed, reserved = (any(result.get(key) for result in rows) for key in ("tokens_per_second", "reserved_memory"))
    parts = max(rows, key=lambda result: result.get("steps", 0), default={})
    crowded, train_on = options.get("parallel", 1) > 1 and not timed, "" if options["train_on_all"] else "response "
    held_out, questions = parts.get("held_out_examples"), parts.get("questions")
    notes = (
        (True, f"*max memory*: {counted}."),
        (reserved, "*reserved*: the most that torch's allocator took of the GPU, what it keeps for later included."),
        (True, "*state*: bytes of all optimizer state, divided by the number of parameters."),
        (timed, _RATE.format(skipped)),
        (crowded, "Several runs were on one device at once, so that times say nothing and are left out."),
        (
            held_out,
            f"*held-out loss*: mean negative log-likelihood of a {train_on}token in {held_out} records set aside.",
        ),
        (
            questions,
            f"*mc1*, *mc2*: accuracy on {questions} questions, as truthfulqa_mc1 and truthfulqa_mc2 of lm-eval.",
        ),
        (options["data"] == "builtin", _BUILTIN),
        (timed, _COMPILE),
        (options.get("seeds", 1) > 1, "*±*: standard deviation of a run, over seeds."),
        (True, _SAME),
    )
    return [note for shown, note in notes if shown]
