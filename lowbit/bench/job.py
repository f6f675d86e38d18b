"""A run of the benchmark in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, replace

from lowbit.bench.statistics import NOT_TUNED

WORKER = (sys.executable, "-m", "lowbit.bench.worker")
# of a result: what says nothing when other runs are on the device
TIMES = (
    "tokens_per_second", "padded_tokens_per_second", "model_first_step", "model_step", "optimizer_first_step",
    "optimizer_step",
)  # fmt: skip


class Job:
    """A worker process, its events and its end.

    ``key`` is ``(optimizer, seed)`` of its row. With ``crowded``, others run on its device at the same time.
    """

    def __init__(self, optimizer, seed, options, folder, crowded=False):
        self.optimizer, self.seed = optimizer or NOT_TUNED, seed
        self.key, self.crowded, self.fresh_caches = (self.optimizer, seed), crowded, options.fresh_caches
        # each its part of the cores: threads of one that wait in a spin take them from the others
        self.threads = max(1, (os.cpu_count() or 1) // options.parallel) if options.parallel > 1 else None
        several = options.seeds > 1 and optimizer
        self.title = f"{self.optimizer}, seed {seed}" if several else self.optimizer
        name = self.optimizer.replace(" ", "-") + f"-seed{seed}" * bool(several)
        logs = folder / "jobs"
        logs.mkdir(parents=True, exist_ok=True)
        self.path, self.log = logs / f"{name}.json", logs / f"{name}.log"
        self.checkpoints = logs / f"{name}-checkpoints"
        if not options.resume:
            self.clean()
        options = replace(options, seed=seed)
        work = {"options": asdict(options), "optimizer": optimizer, "checkpoints": str(self.checkpoints)}
        self.path.write_text(json.dumps(work, indent=1) + "\n")
        self.last, self.status, self.worker, self.stopped = None, None, None, False

    def clean(self):
        """Delete the checkpoints of the run, which is done."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def events(self, gpu=None):
        """The worker's events, as they come; it sees one ``gpu`` only, by number, if that is given.

        The worker is stopped if the caller stops.
        """
        with self.log.open("w") as log, self._environment(gpu) as environment:
            # a session of its own: Ctrl-C is this process's to handle
            self.worker = subprocess.Popen(
                [*WORKER, str(self.path)], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env=environment,
            )  # fmt: skip
            try:
                if self.stopped:
                    return
                for line in self.worker.stdout:
                    self.last = json.loads(line)
                    yield self.last
                self.status = self.worker.wait()
            finally:
                self._kill()

    @contextmanager
    def _environment(self, gpu):
        """Variables of the worker's environment; fresh compile caches are deleted afterwards."""
        environment = dict(os.environ)
        if gpu is not None:
            seen = environment.get("CUDA_VISIBLE_DEVICES", "")
            environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
        if self.threads:
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        if not self.fresh_caches:
            yield environment
            return
        with tempfile.TemporaryDirectory(prefix="lowbit-", ignore_cleanup_errors=True) as caches:
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                environment[name] = os.path.join(caches, name)
            yield environment

    def stop(self):
        """Kill the worker for good; returns whether it had begun."""
        self.stopped = True
        self._kill()
        return self.worker is not None

    def _kill(self):
        if self.worker and self.worker.poll() is None:
            self.worker.kill()
            self.worker.wait()

    @property
    def user_error(self):
        """Whether the worker failed for a reason that the user's options name."""
        return bool(self.last) and self.last["event"] == "failure" and self.last["user"]

    def row(self):
        """The job's row of the report."""
        event = (self.last or {}).get("event")
        if event == "result":
            left_out = {"event", *(TIMES if self.crowded else ())}
            result = {key: value for key, value in self.last.items() if key not in left_out}
            if self.crowded and "curves" in result:
                result["curves"] = {name: points for name, points in result["curves"].items() if name != "seconds"}
            return self._row("ok", None, result)
        if self.stopped:
            last = self.last or {}
            place = f"{last['stage']}, {last['done']} of {last['total']}" if event == "progress" else "the start"
            return self._row("interrupted", f"in {place}", {})
        if event == "failure":
            reason = self.last["reason"]
        elif self.status == -signal.SIGKILL:
            reason = "killed by the system, most likely out of memory: lower --batch-size or --max-length"
        else:
            reason = f"the worker ended with status {self.status}: see {self.log}"
        return self._row("failed", reason, {})

    def _row(self, status, reason, result):
        return {
            "optimizer": self.optimizer, "seed": self.seed, "status": status, "reason": reason, "result": result,
        }  # fmt: skip
