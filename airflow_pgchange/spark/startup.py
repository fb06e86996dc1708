"""Start the JVM faster, by a class-data archive that is made once for each pair of Java and Spark."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from airflow_pgchange.spark import package

log = logging.getLogger(__name__)

SHORT_RUN = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options that compile quickly rather than well, and collect garbage with one thread. They suit runs of seconds, not of
hours.

The archive can only be used with the garbage collector with which it was made.
"""

QUIET = "-Xlog:cds=off,cds+dynamic=off"
PATIENCE = 300.0
WARM_UP = Path(__file__).with_name("warm_up.py")


def conf(spark_binary: str = "spark-submit") -> dict[str, str]:
    """Return Spark properties for a driver that lives for seconds. If the archive cannot be made, they do without it."""
    made = _archive(spark_binary)
    options = [*SHORT_RUN] if made is None else [*SHORT_RUN, f"-XX:SharedArchiveFile={made}", QUIET]
    return {"spark.driver.extraJavaOptions": " ".join(options)}


def _archive(spark_binary: str) -> Path | None:
    spark, java = shutil.which(spark_binary), _java()
    if spark is None or java is None:
        log.warning("no class-data archive: %s and java must be on PATH", spark_binary)
        return None
    try:
        target = package.cache() / f"classes-{_fingerprint(spark, java)}.jsa"
    except OSError as error:
        log.warning("no class-data archive: %s", error)
        return None
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if package.is_trusted(target) or _make(spark, target):
            return target
    return None


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home, "bin")) if home else None)


def _fingerprint(*programs: str) -> str:
    seen = [(path, path.stat().st_mtime_ns) for path in (Path(one).resolve() for one in programs)]
    return hashlib.sha256(str(seen).encode()).hexdigest()[:16]


def _make(spark: str, target: Path) -> bool:
    part = target.with_suffix(".part")
    options = f"-XX:ArchiveClassesAtExit={part} {' '.join(SHORT_RUN)}"
    confs = ("--conf", f"spark.driver.extraJavaOptions={options}")
    log.info("making the class-data archive of Spark's driver, once: %s", target)
    # Copy the script to a folder of its own: a script's folder comes first on Python's path, and this folder has a module
    # named types.
    with TemporaryDirectory(prefix="pgchange-") as folder:
        application = shutil.copy(WARM_UP, folder)
        command = [spark, "--master", "local[1]", *confs, application]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
            part.chmod(0o600)
            part.replace(target)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or ""
            log.warning("no class-data archive, so Spark starts slower: %s\n%s", error, output[-2000:])
            part.unlink(missing_ok=True)
            return False
    return True
