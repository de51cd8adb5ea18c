package io.quire.conformance

import org.apache.hadoop.conf.Configuration

import org.apache.spark.sql.execution.streaming.state.StateStoreProvider

/** The newest version that a store holds, for tests that want the latest without saying which. */
object LatestVersion {
  /** Found by the files: the name of each begins with its version, whatever follows. */
  def of(provider: StateStoreProvider): Long = {
    val folder = provider.stateStoreId.storeCheckpointLocation()
    val files = folder.getFileSystem(new Configuration)
    val found = if (files.exists(folder)) files.listStatus(folder).toSeq else Nil
    found.map(_.getPath.getName.takeWhile(_.isDigit)).filter(_.nonEmpty).map(_.toLong)
      .maxOption.getOrElse(0L)
  }
}
