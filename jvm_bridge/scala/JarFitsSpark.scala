package io.quire.spark

/**
 * What a provider checks before all else. Spark's traits differ between versions, and those of the
 * wrong one fail while an object of the provider is made, with an error that says nothing.
 */
private[spark] abstract class JarFitsSpark {
  NativeLibrary.checkSpark()
}
