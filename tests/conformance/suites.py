"""Spark's suites that keep state in a store, by what they are about; each group runs in a JVM of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SQL = "org.apache.spark.sql."
_STREAMING = _SQL + "streaming."
_EXECUTION = _SQL + "execution.streaming."
_STATE = _EXECUTION + "state."
_SOURCE = _SQL + "execution.datasources.v2.state."


@dataclass(frozen=True)
class Suite:
    """One of Spark's suites and how it reaches Quire's provider.

    ``names`` tells what the session's configuration holds where a test sets the provider: "own" is Quire's class, as a
    user would set it, with Quire's session extension; "spark" leaves Spark's name there and has Spark's factory make
    Quire's provider, for what Spark does only for a provider named like its own. ``only`` names the tests to run where
    the rest of the suite keeps no state; empty is all. ``quick`` suites run in ``make test``, too.
    """

    name: str
    group: str
    names: Literal["own", "spark"] = "own"
    only: tuple[str, ...] = ()
    quick: bool = False

    @property
    def short(self) -> str:
        """The class without its package."""
        return self.name.rpartition(".")[2]


def _group(
    group: str, package: str, suites: str, quick: str = "", names: Literal["own", "spark"] = "own"
) -> list[Suite]:
    chosen = quick.split()
    return [Suite(package + suite, group, names, quick=suite in chosen) for suite in suites.split()]


SUITES: list[Suite] = [
    # The store itself. The RocksDB suites test all of the contract that HDFSBacked lacks: column families, merges,
    # range scans by every type, range deletion, checkpoint format 2.
    *_group(
        "store",
        _STATE,
        """QuireProviderSuite QuireStateStoreSuite QuireStateStoreWithRowChecksumSuite
        RocksDBStateStoreSuite RocksDBStateStoreSuiteWithRowChecksum RocksDBTimestampEncoderOperationsSuite
        StateStoreRDDSuite StateStoreCoordinatorSuite StateStoreCoordinatorStreamingSuite
        RocksDBStateStoreIntegrationSuite RocksDBStateStoreIntegrationSuiteWithRowChecksum
        RocksDBStateStoreCheckpointFormatV2Suite RocksDBStateStoreCheckpointFormatV2SuiteWithRowChecksum
        StateStoreInstanceMetricSuite StateStoreInstanceMetricSuiteWithRowChecksum""",
        quick="QuireProviderSuite QuireStateStoreSuite",
    ),
    Suite(
        _STATE + "StateStoreSuite",
        "store",
        only=(
            "reports memory usage on current version",
            "SPARK-48105: state store unload/close happens during the maintenance",
            "SPARK-21145: Restarted queries create new provider instances",
        ),
    ),
    # What Spark's operators keep their state through.
    *_group(
        "state managers",
        _STATE,
        """SymmetricHashJoinStateManagerSuite SymmetricHashJoinStateManagerEventTimeInKeySuite
        SymmetricHashJoinStateManagerEventTimeInValueSuite StreamingSessionWindowStateManagerSuite""",
    ),
    *_group("state managers", _EXECUTION, "MergingSortWithSessionWindowStateIteratorSuite"),
    *_group(
        "state variables",
        _STATE,
        """ValueStateSuite ListStateSuite MapStateSuite TimerSuite StatefulProcessorHandleSuite
        ValueStateSuiteWithRowChecksum ListStateSuiteWithRowChecksum MapStateSuiteWithRowChecksum
        TimerSuiteWithRowChecksum StatefulProcessorHandleSuiteWithRowChecksum""",
        quick="ValueStateSuite ListStateSuite MapStateSuite TimerSuite",
    ),
    # Operators, each suite in every state format version it knows.
    *_group(
        "aggregation",
        _STREAMING,
        """StreamingAggregationSuite RocksDBStateStoreStreamingAggregationSuite StreamingAggregationDistributionSuite
        DeprecatedStreamingAggregationSuite""",
        quick="StreamingAggregationDistributionSuite",
    ),
    *_group(
        "deduplication",
        _STREAMING,
        """StreamingDeduplicationSuite RocksDBStateStoreStreamingDeduplicationSuite
        StreamingDeduplicationWithinWatermarkSuite StreamingDeduplicationDistributionSuite""",
        quick="StreamingDeduplicationWithinWatermarkSuite",
    ),
    *_group(
        "joins",
        _STREAMING,
        """StreamingInnerJoinWithVCFSuite StreamingInnerJoinWithoutVCFSuite StreamingInnerJoinV4Suite
        StreamingOuterJoinWithVCFSuite StreamingOuterJoinWithoutVCFSuite StreamingOuterJoinV4Suite
        StreamingFullOuterJoinWithVCFSuite StreamingFullOuterJoinWithoutVCFSuite StreamingFullOuterJoinV4Suite
        StreamingLeftSemiJoinWithVCFSuite StreamingLeftSemiJoinWithoutVCFSuite StreamingLeftSemiJoinV4Suite""",
        quick="StreamingLeftSemiJoinV4Suite",
    ),
    *_group(
        "session windows",
        _STREAMING,
        "StreamingSessionWindowSuite StreamingSessionWindowDistributionSuite",
    ),
    *_group(
        "flatMapGroupsWithState",
        _STREAMING,
        """FlatMapGroupsWithStateSuite RocksDBStateStoreFlatMapGroupsWithStateSuite
        FlatMapGroupsWithStateWithInitialStateSuite FlatMapGroupsWithStateDistributionSuite
        FlatMapGroupsInPandasWithStateSuite FlatMapGroupsInPandasWithStateDistributionSuite""",
    ),
    *_group(
        "several operators",
        _STREAMING,
        "MultiStatefulOperatorsSuite EventTimeWatermarkSuite StreamingQueryOptimizationCorrectnessSuite",
    ),
    *_group("several operators", _EXECUTION, "EventTimeWatermarkWithWatermarkDefInSelectSuite"),
    Suite(
        _STREAMING + "StreamingQuerySuite",
        "several operators",
        only=(
            "SPARK-49905 shuffle added by stateful operator should use the shuffle origin "
            "`REQUIRED_BY_STATEFUL_OPERATOR`",
            "SPARK-53942: changing the number of stateful shuffle partitions via config",
        ),
    ),
    # transformWithState; its suites run most tests with state kept as UnsafeRow and as Avro.
    *_group(
        "transformWithState",
        _STREAMING,
        """TransformWithStateUnsafeRowSuite TransformWithStateAvroSuite TransformWithStateValidationSuite
        TransformWithStateClusterSuite TransformWithStateInitialStateSuite
        TransformWithStateInitialStateSuiteCheckpointV2 TransformWithStateInitialStateSuiteWithRowChecksum
        TransformWithStateChainingSuite TransformWithStateChainingSuiteWithRowChecksum TwsTesterFuzzTestSuite""",
        quick="TransformWithStateChainingSuite",
    ),
    *_group(
        "transformWithState variables",
        _STREAMING,
        """TransformWithListStateSuite TransformWithListStateSuiteWithRowChecksum TransformWithMapStateSuite
        TransformWithMapStateSuiteWithRowChecksum TransformWithValueStateTTLSuite TransformWithListStateTTLSuite
        TransformWithMapStateTTLSuite""",
        quick="TransformWithMapStateSuite",
    ),
    # State read as a table.
    *_group(
        "state data source",
        _SOURCE,
        """HDFSBackedStateDataSourceReadSuite RocksDBStateDataSourceReadSuite
        RocksDBWithChangelogCheckpointStateDataSourceReaderSuite RocksDBWithCheckpointV2StateDataSourceReaderSuite
        RocksDBWithCheckpointV2StateDataSourceReaderSnapshotSuite HDFSBackedStateDataSourceChangeDataReaderSuite
        RocksDBWithChangelogCheckpointStateDataSourceChangeDataReaderSuite
        RocksDBWithCheckpointV2StateDataSourceChangeDataReaderSuite StateDataSourceNegativeTestSuite
        StateDataSourceSQLConfigSuite StateDataSourceNoEmptyDirCreationSuite StateDataSourceTransformWithStateSuite
        StateDataSourceTransformWithStateSuiteCheckpointV2 StateDataSourceTransformWithStateSuiteWithRowChecksum""",
    ),
    *_group("state data source", _STATE, "OperatorStateMetadataSuite"),
    # Spark moves state between partitions only for a provider named like RocksDB's.
    *_group("repartition", _SOURCE, "StatePartitionAllColumnFamiliesReaderSuite", names="spark"),
    *_group(
        "repartition",
        _STATE,
        """StatePartitionAllColumnFamiliesWriterSuite OfflineStateRepartitionSuite
        OfflineStateRepartitionCkptV1IntegrationSuite OfflineStateRepartitionCkptV2IntegrationSuite
        OfflineStateRepartitionJoinCkptV1IntegrationSuite OfflineStateRepartitionJoinCkptV2IntegrationSuite
        OfflineStateRepartitionTransformWithStateCkptV1IntegrationSuite
        OfflineStateRepartitionTransformWithStateCkptV2IntegrationSuite""",
        names="spark",
    ),
]
