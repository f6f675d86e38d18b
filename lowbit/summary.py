"""What an optimizer keeps: formats, tensors, bytes."""

from dataclasses import dataclass

from lowbit.plan import plan


@dataclass
class Row:
    """Parameters that are kept alike."""

    state: str
    weights: str
    dtype: str
    tensors: int = 0
    params: int = 0
    bytes: int = 0


@dataclass
class Summary:
    """Rows and totals; ``str()`` is a table. Bytes are those of state, parameters and gradients not counted."""

    rows: list

    @classmethod
    def of(cls, optimizer):
        """The summary of all parameters of an optimizer, whether they have state yet or not."""
        rows = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                layout = plan(p, group)
                key = (layout.format.name, layout.weights.name, str(p.dtype).removeprefix("torch."))
                row = rows.setdefault(key, Row(*key))
                row.tensors += 1
                row.params += layout.numel
                row.bytes += layout.nbytes
        return cls(sorted(rows.values(), key=lambda row: -row.params))

    @property
    def params(self):
        """Number of elements."""
        return sum(row.params for row in self.rows)

    @property
    def bytes(self):
        """Bytes of state."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_param(self):
        """Bytes of state an element."""
        return self.bytes / max(self.params, 1)

    def __str__(self):
        total = Row("total", "", "", sum(row.tensors for row in self.rows), self.params, self.bytes)
        lines = [f"{'state':8}{'weights':12}{'dtype':10}{'tensors':>8}{'parameters':>16}{'bytes':>16}{'B/param':>9}"]
        for row in (*self.rows, total):
            lines.append(
                f"{row.state:8}{row.weights:12}{row.dtype:10}{row.tensors:8,}{row.params:16,}{row.bytes:16,}"
                f"{row.bytes / max(row.params, 1):9.3f}"
            )
        return "\n".join(lines)
