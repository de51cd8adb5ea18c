package io.quire.spark

import java.io.BufferedOutputStream
import java.nio.file.{Files, Paths, StandardCopyOption}

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.{FileAlreadyExistsException, FileSystem, FsConstants, FSDataOutputStream, Path, RawLocalFileSystem}
import org.apache.hadoop.fs.local.LocalFs

import org.apache.spark.sql.execution.streaming.checkpointing.{CheckpointFileManager, FileSystemBasedCheckpointFileManager}
import org.apache.spark.sql.internal.SQLConf

/**
 * Spark's file manager over the system's own files.
 *
 * On a local disk Spark's default starts a process for each mode it sets (`chmod`) and for both
 * names of a rename (`readlink`): tens of milliseconds for each commit of each store. This one asks
 * for neither. A rename replaces the old file at once, as the system promises.
 */
private[spark] class LocalFileManager(path: Path, hadoopConf: Configuration)
  extends FileSystemBasedCheckpointFileManager(path, hadoopConf) {

  override protected val fs: FileSystem = {
    val raw = new RawLocalFileSystem
    raw.initialize(FsConstants.LOCAL_FS_URI, hadoopConf)
    raw
  }

  def file(path: Path): java.nio.file.Path = Paths.get(path.toUri.getPath)

  override def mkdirs(path: Path): Unit = Files.createDirectories(file(path))

  override def createTempFile(path: Path): FSDataOutputStream = {
    mkdirs(path.getParent)
    new FSDataOutputStream(new BufferedOutputStream(Files.newOutputStream(file(path))), null)
  }

  override def renameTempFile(from: Path, to: Path, overwriteIfPossible: Boolean): Unit = {
    if (!overwriteIfPossible && exists(to)) throw new FileAlreadyExistsException(s"$to is there")
    Files.move(file(from), file(to), StandardCopyOption.ATOMIC_MOVE)
    // Another file manager may have left its checksum of a file that was here before.
    Files.deleteIfExists(file(new Path(to.getParent, s".${to.getName}.crc")))
  }
}

private[spark] object LocalFileManager {
  private val ClassKey = SQLConf.STREAMING_CHECKPOINT_FILE_MANAGER_CLASS.parent.key
  private val LocalKey = "fs.AbstractFileSystem.file.impl"

  /** Spark's choice for the path, but for a local disk that nobody has set otherwise. */
  def create(path: Path, hadoopConf: Configuration): CheckpointFileManager = {
    val scheme = Option(path.toUri.getScheme)
      .getOrElse(FileSystem.getDefaultUri(hadoopConf).getScheme)
    val plain = scheme == FsConstants.LOCAL_FS_URI.getScheme &&
      hadoopConf.get(ClassKey) == null &&
      hadoopConf.get(LocalKey, classOf[LocalFs].getName) == classOf[LocalFs].getName
    if (plain) {
      new LocalFileManager(path, hadoopConf)
    } else {
      CheckpointFileManager.create(path, hadoopConf)
    }
  }
}
