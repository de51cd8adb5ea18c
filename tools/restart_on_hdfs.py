"""How fast Spark's provider loads a state from HDFS, beside a plain read of the same bytes by the same client.

The HDFS of the tests (tests/hdfs/cluster.py) is on this machine, so a plain read comes out of the page cache and is
bounded by the cores, which loading needs, too. With --bandwidth each of the three DataNodes gives no more than so many
MB/s, as behind a network: 125 is one of 1 Gbit/s.

Use: restart_on_hdfs.py [--keys N] [--bandwidth MB] [--changes N ...] [PROVIDER ...]; one line of JSON for each number.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hdfs"))

from cluster import Cluster  # noqa: E402

from quire.bench import spark  # noqa: E402
from quire.bench.core import Case  # noqa: E402

PROVIDERS = ["quire", "quire-pages", "quire-cec"]


def main() -> None:
    """Measures each provider with each number of commits beyond the base."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("providers", nargs="*", default=PROVIDERS, metavar="PROVIDER", choices=[*spark.PROVIDERS, []])
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--changes", type=int, nargs="+", default=[0, 5], help="commits of 2 %% beyond the base")
    parser.add_argument("--bandwidth", type=int, default=0, help="MB/s of each DataNode; default: no bound")
    options = parser.parse_args()
    conf = {"dfs.datanode.data.read.bandwidthPerSec": options.bandwidth * 1_000_000}
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name) / "hdfs", conf=conf) as cluster:
        for provider in options.providers:
            for changes in options.changes:
                folder = Path(name) / f"{provider}-{changes}"
                folder.mkdir()
                case = Case("spark.restart", "hdfs", provider, options.keys, options.keys, 1, folder)
                arguments = {"folder": cluster.uri(f"/{folder.name}"), "changes": changes}
                list(spark.jvm(case, "restart_fill", **arguments))
                for found in spark.jvm(case, "restart_load", **arguments):
                    told = {"provider": provider, "commits": changes, "measure": found.measure, "value": found.value}
                    print(json.dumps(told | {"unit": found.unit}), flush=True)


if __name__ == "__main__":
    main()
