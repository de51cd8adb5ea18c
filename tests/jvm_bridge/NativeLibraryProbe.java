import java.io.File;
import java.io.FilterInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.lang.reflect.InvocationTargetException;
import java.net.MalformedURLException;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * Loads the native library out of each jar named, each in a class loader of its own, and prints what came of it:
 * "loaded VERSION" or "refused MESSAGE", by eight threads at once. Then: "mapped COUNT", how many copies this
 * process holds. While a library is unpacked it prints the permissions of what is in java.io.tmpdir.
 */
public class NativeLibraryProbe {
    /** Looks at what is unpacked while it is unpacked. */
    static class Watching extends URLClassLoader {
        Watching(String jar) throws MalformedURLException {
            super(new URL[] {new File(jar).toURI().toURL()}, NativeLibraryProbe.class.getClassLoader());
        }

        @Override
        public InputStream getResourceAsStream(String name) {
            InputStream in = super.getResourceAsStream(name);
            if (in == null || !name.startsWith("native/")) {
                return in;
            }
            return new FilterInputStream(in) {
                private boolean shown;

                @Override
                public int read(byte[] bytes, int offset, int length) throws IOException {
                    if (!shown) {
                        shown = true;
                        show();
                    }
                    return super.read(bytes, offset, length);
                }
            };
        }

        private static void show() throws IOException {
            Path base = Path.of(System.getProperty("java.io.tmpdir"));
            try (Stream<Path> found = Files.walk(base)) {
                for (Path path : found.filter(path -> !path.equals(base)).sorted().collect(Collectors.toList())) {
                    String mode = PosixFilePermissions.toString(Files.getPosixFilePermissions(path));
                    System.out.println("unpacking " + mode + " " + path.getFileName());
                }
            }
        }
    }

    static String load(ClassLoader loader, boolean direct) throws Exception {
        try {
            if (direct) {
                Class.forName("io.quire.spark.NativeLibrary", true, loader).getMethod("load").invoke(null);
            }
            Class<?> natives = Class.forName("io.quire.spark.Native", true, loader);
            return "loaded " + natives.getMethod("libraryVersion").invoke(null);
        } catch (InvocationTargetException e) {
            return "refused " + e.getCause().getMessage();
        }
    }

    public static void main(String[] jars) throws Exception {
        for (String jar : jars) {
            ClassLoader loader = new Watching(jar);
            boolean mixed = jars.length == 2;
            List<Callable<String>> calls = IntStream.range(0, 8)
                .<Callable<String>>mapToObj(i -> () -> load(loader, !mixed || i % 2 == 0))
                .collect(Collectors.toList());
            var pool = Executors.newFixedThreadPool(8);
            for (var result : pool.invokeAll(calls).stream().map(future -> {
                try {
                    return future.get();
                } catch (Exception e) {
                    return "failed " + e;
                }
            }).collect(Collectors.toSet())) {
                System.out.println(result);
            }
            pool.shutdown();
        }
        long copies = Files.readAllLines(Path.of("/proc/self/maps")).stream()
            .filter(line -> line.contains("libquire_jni.so"))
            .map(line -> line.trim().split("\\s+")[4])
            .distinct()
            .count();
        System.out.println("mapped " + copies);
    }
}
