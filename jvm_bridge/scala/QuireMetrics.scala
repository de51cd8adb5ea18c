package io.quire.spark

import org.apache.spark.sql.execution.streaming.state._

/** The metrics that a store reports beside the number of keys and the memory in use. */
private[spark] object QuireMetrics {
  private def size(name: String, text: String) = StateStoreCustomSizeMetric(name, s"Quire: $text")
  private def time(name: String, text: String) = StateStoreCustomTimingMetric(name, s"Quire: $text")
  private def sum(name: String, text: String) = StateStoreCustomSumMetric(name, s"Quire: $text")

  val PagesUsed = sum("quirePagesUsed", "pages in use by the current version")
  val PagesDirty = sum("quirePagesDirty", "pages changed by this batch")
  val PagesPinned = sum("quirePagesPinned", "pages kept for earlier versions and readers only")
  val PagesFree = sum("quirePagesFree", "pages held for reuse")
  val Snapshots = sum("quireSnapshots", "versions and readers that pin pages")
  val BytesReserved = size("quireBytesReserved", "address space reserved")

  val CommitBytes = size("quireCommitBytes", "bytes written by the commit")
  val CommitRawBytes = size("quireCommitRawBytes", "bytes of the commit before compression")
  val CommitWriteTime = time("quireCommitWriteTimeMs", "commit - time to capture and write changes")
  val CommitPublishTime = time("quireCommitPublishTimeMs", "commit - time to publish the version")

  val LoadTime = time("quireLoadTimeMs", "time to load the version")
  val LoadedFromMemory = sum("quireLoadedFromMemory", "versions found in memory")
  val LoadedFromFiles = sum("quireLoadedFromCheckpoint", "versions read from the checkpoint")
  val DeltasReplayed = sum("quireDeltasReplayed", "delta files read to load the version")
  val BasesRepaired = sum("quireBasesRepaired", "bad bases that were replaced by an older one")

  val BasesWritten = sum("quireBasesWritten", "bases written since the last batch")
  val BaseBytes = size("quireBaseBytes", "bytes of the bases written since the last batch")
  val SnapshotLag = sum("quireSnapshotLag", "versions since the last base")
  val ForcedBases = sum("quireforceSnapshotCount", "commits that were told to write a base")
  val LogExtent = sum("quireLogExtent", "records of the log that a restart needs (cec)")
  val LogChecks = sum("quireLogChecks", "records written again by the commit (cec)")
  val InternalKeys = sum("quireInternalKeys", "keys in column families of Spark's own")
  val Families = sum("quireColumnFamilies", "column families")

  val LastBase = StateStoreSnapshotLastUploadInstanceMetric()

  val All: Seq[StateStoreCustomMetric] = Seq(
    PagesUsed, PagesDirty, PagesPinned, PagesFree, Snapshots, BytesReserved,
    CommitBytes, CommitRawBytes, CommitWriteTime, CommitPublishTime,
    LoadTime, LoadedFromMemory, LoadedFromFiles, DeltasReplayed, BasesRepaired,
    BasesWritten, BaseBytes, SnapshotLag, ForcedBases, LogExtent, LogChecks,
    InternalKeys, Families)
}
