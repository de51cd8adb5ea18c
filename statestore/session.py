"""Prepares a Spark session to keep its state in Quire."""

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import quire
from quire.pagemgr import BusyError, InvalidError, NotFoundError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROVIDER = "io.quire.spark.QuireStateStoreProvider"
EXTENSIONS = "io.quire.spark.QuireExtensions"
PREFIX = "spark.sql.streaming.stateStore.quire."
UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
PAGE_SIZES = [1 << bits for bits in range(10, 17)]


def memory_limit(value: object) -> str:
    """Checks a limit in bytes, as a number or with a unit."""
    text = str(value).lower() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"([0-9]+)([kmg]?)", text)
    if match is None or int(match[1]) << UNITS[match[2]] < 1 << 20:
        raise InvalidError(
            f"memory_limit is {value!r}; it must be a number of bytes, such as 536870912, or a text with one of the "
            "units k, m and g, such as '512m'; at least 1m"
        )
    return text


def page_size(value: object) -> str:
    """Checks the size of a page in bytes."""
    if not isinstance(value, int) or value not in PAGE_SIZES:
        raise InvalidError(f"page_size is {value!r}; it must be one of {', '.join(map(str, PAGE_SIZES))}")
    return str(value)


# Each option of configure(): the property that it sets, and the check that gives the property's text.
OPTIONS: dict[str, tuple[str, Callable[[object], str]]] = {
    "memory_limit": (PREFIX + "memoryLimit", memory_limit),
    "page_size": (PREFIX + "pageSize", page_size),
}


def configure(builder: "SparkSession.Builder", **options: object) -> "SparkSession.Builder":
    """Gives the builder of a Spark session back, ready to keep all state of streaming queries in Quire.

    It builds the jar if need be (``quire.jar()``) and sets ``spark.jars``, the provider and the extension, which
    transformWithState needs and aggregations are faster with; jars and extensions that the builder has already are
    kept. Options:

    - ``memory_limit``: what all stores of one executor may take outside the JVM's heap together, in bytes or such as
      ``"512m"``, at least ``"1m"``; no limit by default.
    - ``page_size``: bytes of a page, a power of two from 1024 to 65536.

    >>> from pyspark.sql import SparkSession
    >>> spark = quire.configure(SparkSession.builder, memory_limit="2g").getOrCreate()  # doctest: +SKIP
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NotFoundError(f"configure() needs PySpark: pip install 'quire[spark]' ({error})") from error
    if not isinstance(builder, SparkSession.Builder):
        raise InvalidError(f"configure() takes a SparkSession.builder, not {type(builder).__name__}")
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise InvalidError(f"configure() has no option {', '.join(unknown)}; allowed are {', '.join(OPTIONS)}")
    properties = {OPTIONS[name][0]: OPTIONS[name][1](value) for name, value in options.items()}

    given: dict[str, Any] = builder._options
    if "spark.remote" in given or "SPARK_REMOTE" in os.environ:
        raise InvalidError(
            "configure() cannot reach a Spark Connect server: start the server itself with Quire's jar and properties "
            "(docs/deploy.md)"
        )
    properties["spark.sql.streaming.stateStore.providerClass"] = PROVIDER
    properties["spark.sql.extensions"] = with_entry(given.get("spark.sql.extensions"), EXTENSIONS)
    if not jvm_has_quire():
        properties["spark.jars"] = with_entry(given.get("spark.jars"), str(quire.jar()))
    for key, value in properties.items():
        builder = builder.config(key, value)
    return builder


def with_entry(value: object, entry: str) -> str:
    """Adds an entry to a list with commas in it, if it is not there yet."""
    entries = [text for text in str(value or "").split(",") if text.strip()]
    return ",".join(entries if entry in entries else [*entries, entry])


def jvm_has_quire() -> bool:
    """Whether a JVM runs already and has Quire's jar; if it runs and has not, that is an error: it is too late."""
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    # spark-submit starts the JVM before it starts Python, and leaves the port in the environment.
    if SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        return False
    SparkContext._ensure_initialized()
    jvm: Any = SparkContext._jvm
    try:
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        jvm.java.lang.Class.forName(EXTENSIONS, False, loader)
    except Py4JJavaError as error:
        raise BusyError(
            "Spark's JVM is running already, without Quire's jar, and spark.jars has no effect on it any more. Call "
            "quire.configure() in a fresh Python before the first session, or start the program with "
            'spark-submit --jars "$(quire jar)"'
        ) from error
    context = SparkContext._active_spark_context
    if context is not None and EXTENSIONS not in context.getConf().get("spark.sql.extensions", "").split(","):
        raise BusyError(
            "a SparkContext is active already, and was started without Quire's extension: stop it first "
            "(spark.stop()), or set spark.sql.extensions from the start"
        )
    return True
