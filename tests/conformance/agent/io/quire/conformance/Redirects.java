package io.quire.conformance;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.concurrent.atomic.AtomicLong;

/**
 * What the rewritten classes call: sends requests for Spark's own providers to Quire's, and counts, so that a suite
 * that passes can be told from a suite that passes on Quire.
 */
public final class Redirects {
    /** The provider under test. */
    public static final String PROVIDER = "io.quire.spark.QuireStateStoreProvider";

    private static final String STATE = "org.apache.spark.sql.execution.streaming.state.";
    static final String ROCKSDB = STATE + "RocksDBStateStoreProvider";
    static final String HDFS_BACKED = STATE + "HDFSBackedStateStoreProvider";

    private static final AtomicLong redirected = new AtomicLong();
    private static final AtomicLong opened = new AtomicLong();

    /** One byte for each store opened in another process than the one that runs the suites; null in the latter. */
    static volatile Path tally;

    private Redirects() {}

    /** Called first thing by Spark's StateStoreProvider.create: the class to make an instance of. */
    public static String provider(String name) {
        if (!name.equals(ROCKSDB) && !name.equals(HDFS_BACKED)) {
            return name;
        }
        redirected.incrementAndGet();
        return PROVIDER;
    }

    /** Called where a test class says "new" of one of Spark's own providers and now gets Quire's. */
    public static void replaced() {
        redirected.incrementAndGet();
    }

    /** Called where ScalaTest decides whether what a test threw ends its suite: it does not for a method not found. */
    public static Throwable soften(Throwable thrown) {
        return thrown instanceof LinkageError ? new AssertionError(thrown) : thrown;
    }

    /** Called first thing by Quire's provider when it is initialised, whoever made it. */
    public static void providerOpened() {
        opened.incrementAndGet();
        Path file = tally;
        if (file != null) {
            try {
                Files.write(file, new byte[1], StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            } catch (IOException e) {
                throw new UncheckedIOException(e);
            }
        }
    }

    /** Times that one of Spark's own providers was asked for and Quire's was given, in this process. */
    public static long redirectedCount() {
        return redirected.get();
    }

    /** Stores of Quire opened in this process. */
    public static long openedCount() {
        return opened.get();
    }
}
