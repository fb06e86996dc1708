"""Run a Python function of a DAG file as a Spark application: the task pickles the function, the application calls it."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow_pgchange.errors import InvalidArgument

APPLICATION = "from airflow_pgchange.spark.function import main\n\nmain()\n"


def write(folder: Path, function: Callable[..., object], arguments: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write an application that calls a function into a folder that only its user can read. Return its file, and the
    file with the function and its arguments. Raises InvalidArgument if they cannot be pickled."""
    application, call = folder / "function.py", folder / "function.pickle"
    pickled = _pickled(function, (function, dict(arguments)))
    application.write_text(APPLICATION)
    with open(call, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(pickled)
    return application, call


def main() -> None:
    """Unpickle the function from the file that the command line names, and call it with each batch of this
    application."""
    from airflow_pgchange.spark.entry_point import batch_jobs  # noqa: PLC0415

    file = Path(sys.argv[1])
    call = file.read_bytes()
    file.unlink()
    for job in batch_jobs():
        # Unpickle for each batch, so that a call cannot change the arguments of the next.
        function, arguments = pickle.loads(call)
        function(job=job, **arguments)


def _pickled(function: Callable[..., object], call: object) -> bytes:
    """Pickle a call with the function's code and everything that it uses of its own file, which cannot be imported
    elsewhere."""
    # Import Spark's copy here only, because the import takes as long as Spark's. It has no types.
    cloudpickle: Any = importlib.import_module("pyspark.cloudpickle")

    module = sys.modules.get(function.__module__)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise InvalidArgument(
            f"{function.__name__} cannot be sent to Spark: {error}; create such objects inside the function, and pass "
            f"only values to it"
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled
