package io.quire.spark

import java.io.{IOException, InputStream}
import java.nio.file.{Files, Path, Paths, StandardOpenOption}
import java.nio.file.attribute.PosixFilePermissions
import java.security.MessageDigest
import java.util.{HexFormat, Locale, Properties}

import scala.jdk.CollectionConverters._
import scala.util.Using

import org.apache.spark.SPARK_VERSION

/**
 * Loads the native library that the jar carries.
 *
 * The library is unpacked into a new folder that only this user can enter, compared there with the
 * digest in the jar, loaded, and removed again: Linux keeps what is mapped. So nothing is left
 * behind, and every class loader gets a copy of its own, since a JVM refuses to load one path into
 * two of them.
 */
private[spark] object NativeLibrary {

  /** The system property that names another folder to unpack in than `java.io.tmpdir`. */
  val FolderProperty = "quire.native.dir"

  private val File = "libquire_jni.so"

  /** What the one attempt of this class loader ended with. */
  private lazy val failure: Option[Throwable] =
    try {
      loadOnce()
      None
    } catch {
      case e: IllegalStateException => Some(e)
    }

  /**
   * Makes the native methods of [[Native]] callable. Only the first call does any work; if it
   * failed, all later ones fail with the same message.
   */
  def load(): Unit = {
    // Native calls this while it is initialised, and we call Native. So that no two threads wait
    // for each other, whoever comes has Native initialised first and takes our lock second.
    try {
      Native.getClass
    } catch {
      case _: LinkageError => // it is our own failure in disguise, which follows
    }
    failure.foreach(e => throw new IllegalStateException(e.getMessage, e))
  }

  private def loadOnce(): Unit = {
    val properties = jarProperties()
    checkFits(properties)
    checkSpark()
    val base = Paths.get(
      Option(System.getProperty(FolderProperty)).getOrElse(System.getProperty("java.io.tmpdir")))
    unpacked(base, s"/native/${properties("platform")}/$File") { library =>
      val sha256 = digest(library)
      if (sha256 != properties("sha256")) {
        fail(s"The native library in Quire's jar has the digest $sha256, and the jar says " +
          s"${properties("sha256")}: the jar is damaged or was tampered with. Build it again")
      }
      try {
        System.load(library.toString)
      } catch {
        case e: UnsatisfiedLinkError =>
          fail(s"Quire's native library cannot be loaded from $base: ${e.getMessage}. " +
            "If that folder is mounted noexec, name another one with " +
            s"-D$FolderProperty=/some/folder in spark.driver.extraJavaOptions and " +
            "spark.executor.extraJavaOptions", e)
      }
    }
    val version = Native.libraryVersion()
    if (version != properties("version")) {
      fail(s"Quire's jar is version ${properties("version")}, and the native library in it is " +
        s"$version. Build the jar again, and leave one Quire jar on the class path")
    }
  }

  /** Refuses a jar that was built for another platform. */
  private def checkFits(properties: Map[String, String]): Unit = {
    // Java has a name of its own for x86_64.
    val arch = System.getProperty("os.arch") match {
      case "amd64" => "x86_64"
      case other => other
    }
    val platform = s"${System.getProperty("os.name").toLowerCase(Locale.ROOT)}-$arch"
    if (platform != properties("platform")) {
      fail(s"This machine is $platform, and Quire's jar is for ${properties("platform")}. " +
        "Build the jar on a machine like this one: quire jar --output FILE")
    }
  }

  def checkSpark(): Unit = fitsSpark

  /** Refuses a jar that was built for another Spark; once it fits, it fits. */
  private lazy val fitsSpark: Unit = {
    def minor(version: String): String = version.split('.').take(2).mkString(".")
    val built = jarProperties()("spark")
    if (minor(SPARK_VERSION) != minor(built)) {
      fail(s"This is Spark $SPARK_VERSION, and Quire's jar is for Spark $built. " +
        "Build it for this one: quire jar --jars SPARK_HOME/jars --output FILE")
    }
  }

  private def jarProperties(): Map[String, String] = {
    val properties = new Properties()
    Using.resource(resource("/quire.properties"))(properties.load)
    val found = properties.asScala.toMap
    Seq("platform", "sha256", "spark", "version").filterNot(found.contains).foreach { key =>
      fail(s"quire.properties in Quire's jar has no $key. Build the jar again: quire jar")
    }
    found
  }

  private def resource(name: String): InputStream = Option(getClass.getResourceAsStream(name))
    .getOrElse(fail(s"Quire's jar has no $name. Build it again with: quire jar"))

  /** Calls `use` with a private copy of a file of the jar, then removes the copy. */
  private def unpacked(base: Path, name: String)(use: Path => Unit): Unit = {
    val folder = try {
      Files.createTempDirectory(base, "quire-", permissions("rwx------"))
    } catch {
      case e: IOException =>
        fail(s"Quire cannot unpack its native library in $base: $e. Name another folder with " +
          s"-D$FolderProperty=/some/folder", e)
    }
    val file = folder.resolve(File)
    try {
      try {
        Using.Manager { use =>
          val in = use(resource(name))
          Files.createFile(file, permissions("rw-------"))
          in.transferTo(use(Files.newOutputStream(file, StandardOpenOption.WRITE)))
        }.get
        Files.setPosixFilePermissions(file, PosixFilePermissions.fromString("r-x------"))
      } catch {
        case e: IOException => fail(s"Quire cannot unpack its native library in $folder: $e", e)
      }
      use(file)
    } finally {
      Files.deleteIfExists(file)
      Files.deleteIfExists(folder)
    }
  }

  private def permissions(text: String) =
    PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString(text))

  private def digest(file: Path): String =
    HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(Files.readAllBytes(file)))

  private def fail(message: String, cause: Throwable = null): Nothing =
    throw new IllegalStateException(message, cause)
}
