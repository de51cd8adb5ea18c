package io.quire.conformance;

import java.io.File;
import java.io.IOException;
import java.lang.instrument.ClassFileTransformer;
import java.lang.instrument.Instrumentation;
import java.net.URL;
import java.security.CodeSource;
import java.security.ProtectionDomain;
import java.util.HashMap;
import java.util.Map;

import org.apache.xbean.asm9.ClassReader;
import org.apache.xbean.asm9.ClassVisitor;
import org.apache.xbean.asm9.ClassWriter;
import org.apache.xbean.asm9.MethodVisitor;
import org.apache.xbean.asm9.Opcodes;
import org.apache.xbean.asm9.Type;
import org.apache.xbean.asm9.commons.ClassRemapper;
import org.apache.xbean.asm9.commons.MethodRemapper;
import org.apache.xbean.asm9.commons.Remapper;

/**
 * Rewrites these classes while they are loaded, and no others:
 *
 * <ul>
 *   <li>Spark's StateStoreProvider.create(name): a name of one of Spark's own providers becomes Quire's;
 *   <li>Spark's test classes: the types RocksDBStateStoreProvider and HDFSBackedStateStoreProvider become Quire's
 *       wherever they stand (new, parameters, casts, superclasses). With names=own the class constants of RocksDB's do
 *       as well, so that a test which sets the provider in the session's configuration names Quire's there, as a user
 *       would. With names=spark they stay, for what Spark does only where the configuration names RocksDB's. Those of
 *       HDFSBacked always stay: suites that run each test once for either have the class in the test's name;
 *   <li>test classes that look for a version's files, or for RocksDB among the users of memory: Quire's names stand in
 *       the place of RocksDB's;
 *   <li>Quire's provider: init counts the store;
 *   <li>ScalaTest's Suite: a test that calls a method which only the provider it was written for has fails, and no longer
 *       takes the rest of its suite with it.
 * </ul>
 *
 * Options, given as key=value and joined by commas: tests (the folder with Spark's test classes), names (own or spark),
 * tally (see {@link Redirects}; only for Spark's executor processes).
 */
public final class Agent implements ClassFileTransformer {
    private static final String CONTRACT = "org/apache/spark/sql/execution/streaming/state/StateStoreProvider";
    private static final String FACTORY = CONTRACT + "$";
    private static final String LATEST = "io/quire/conformance/LatestVersion";
    private static final String SUITE = "org/scalatest/Suite$";
    private static final String PROVIDER = Redirects.PROVIDER.replace('.', '/');
    private static final String REDIRECTS = Type.getInternalName(Redirects.class);
    private static final String ROCKSDB = Redirects.ROCKSDB.replace('.', '/');
    private static final Map<String, String> REPLACED =
        Map.of(ROCKSDB, PROVIDER, Redirects.HDFS_BACKED.replace('.', '/'), PROVIDER);

    private static final String STATE = "org/apache/spark/sql/execution/streaming/state/";
    /** Constants of some suites that name what is RocksDB's, and Quire's names for it: files, the user of memory. */
    private static final Map<String, Map<Object, String>> CONSTANTS = Map.of(
        STATE + "StatePartitionAllColumnFamiliesWriterSuite", Map.of(".zip", ".qbase", ".changelog", ".qdelta"),
        STATE + "RocksDBStateStoreIntegrationSuite", Map.of("RocksDB", "Quire"));

    private final File tests;
    private final boolean ownNames;

    private Agent(File tests, boolean ownNames) {
        this.tests = tests;
        this.ownNames = ownNames;
    }

    public static void premain(String arguments, Instrumentation instrumentation) throws IOException {
        Map<String, String> options = new HashMap<>();
        for (String option : arguments.split(",")) {
            int equals = option.indexOf('=');
            options.put(option.substring(0, equals), option.substring(equals + 1));
        }
        if (options.containsKey("tally")) {
            Redirects.tally = new File(options.get("tally")).toPath();
        }
        boolean ownNames = options.get("names").equals("own");
        instrumentation.addTransformer(new Agent(new File(options.get("tests")).getCanonicalFile(), ownNames));
    }

    @Override
    public byte[] transform(
            ClassLoader loader, String name, Class<?> redefined, ProtectionDomain domain, byte[] bytes) {
        try {
            if (FACTORY.equals(name)) {
                return atStartOf("create", bytes, Agent::redirectName);
            }
            if (SUITE.equals(name)) {
                return atStartOf("anExceptionThatShouldCauseAnAbort", bytes, Agent::softenError);
            }
            if (PROVIDER.equals(name)) {
                return atStartOf("init", bytes, code -> call(code, "providerOpened", "()V"));
            }
            return isTest(domain) ? replaceTypes(bytes) : null;
        } catch (Throwable e) {
            // The JVM would go on with the class as it was, and the run would prove nothing.
            e.printStackTrace();
            Runtime.getRuntime().halt(70);
            return null;
        }
    }

    private boolean isTest(ProtectionDomain domain) throws Exception {
        CodeSource source = domain == null ? null : domain.getCodeSource();
        URL place = source == null ? null : source.getLocation();
        return place != null
            && place.getProtocol().equals("file")
            && new File(place.toURI()).getCanonicalFile().equals(tests);
    }

    private interface Prologue {
        void write(MethodVisitor code);
    }

    private static void call(MethodVisitor code, String method, String descriptor) {
        code.visitMethodInsn(Opcodes.INVOKESTATIC, REDIRECTS, method, descriptor, false);
    }

    private static void redirectName(MethodVisitor code) {
        code.visitVarInsn(Opcodes.ALOAD, 1);
        call(code, "provider", "(Ljava/lang/String;)Ljava/lang/String;");
        code.visitVarInsn(Opcodes.ASTORE, 1);
    }

    private static void softenError(MethodVisitor code) {
        code.visitVarInsn(Opcodes.ALOAD, 1);
        call(code, "soften", "(Ljava/lang/Throwable;)Ljava/lang/Throwable;");
        code.visitVarInsn(Opcodes.ASTORE, 1);
    }

    private static byte[] atStartOf(String method, byte[] bytes, Prologue prologue) {
        boolean[] found = {false};
        ClassReader reader = new ClassReader(bytes);
        ClassWriter writer = new ClassWriter(reader, ClassWriter.COMPUTE_MAXS);
        reader.accept(new ClassVisitor(Opcodes.ASM9, writer) {
            @Override
            public MethodVisitor visitMethod(int access, String name, String descriptor, String signature, String[] e) {
                MethodVisitor code = super.visitMethod(access, name, descriptor, signature, e);
                if (!name.equals(method) || (access & (Opcodes.ACC_ABSTRACT | Opcodes.ACC_BRIDGE)) != 0) {
                    return code;
                }
                found[0] = true;
                return new MethodVisitor(Opcodes.ASM9, code) {
                    @Override
                    public void visitCode() {
                        super.visitCode();
                        prologue.write(mv);
                    }
                };
            }
        }, 0);
        if (!found[0]) {
            throw new IllegalStateException("No method " + method + " in " + reader.getClassName());
        }
        return writer.toByteArray();
    }

    private byte[] replaceTypes(byte[] bytes) {
        ClassReader reader = new ClassReader(bytes);
        ClassWriter writer = new ClassWriter(0);
        Remapper names = new Remapper(Opcodes.ASM9) {
            @Override
            public String map(String internalName) {
                return REPLACED.getOrDefault(internalName, internalName);
            }

            @Override
            public Object mapValue(Object value) {
                Map<Object, String> constants = CONSTANTS.getOrDefault(reader.getClassName(), Map.of());
                if (constants.containsKey(value)) {
                    return constants.get(value);
                }
                boolean constant = value instanceof Type && ((Type) value).getSort() == Type.OBJECT;
                boolean mapped = ownNames && value.equals(Type.getObjectType(ROCKSDB));
                return constant && !mapped ? value : super.mapValue(value);
            }
        };
        reader.accept(new ClassRemapper(Opcodes.ASM9, writer, names) {
            @Override
            protected MethodVisitor createMethodRemapper(MethodVisitor code) {
                return new MethodRemapper(Opcodes.ASM9, code, remapper) {
                    @Override
                    public void visitMethodInsn(int opcode, String owner, String name, String type, boolean trait) {
                        if (owner.equals(ROCKSDB) && name.equals("latestVersion")) {
                            // Only RocksDB's provider tells; a suite of shared tests asks it in each of them.
                            mv.visitMethodInsn(Opcodes.INVOKESTATIC, LATEST, "of", "(L" + CONTRACT + ";)J", false);
                        } else if (REPLACED.containsKey(owner) && name.equals("getReadStore")) {
                            // RocksDB's provider promises more here than the contract does.
                            String contract = type.replace("/StateStore;", "/ReadStateStore;");
                            super.visitMethodInsn(opcode, owner, name, contract, trait);
                        } else {
                            super.visitMethodInsn(opcode, owner, name, type, trait);
                        }
                    }

                    @Override
                    public void visitTypeInsn(int opcode, String type) {
                        if (opcode == Opcodes.INSTANCEOF) {
                            // A test that asks whether the provider is one of Spark's own is to hear that it is not.
                            mv.visitTypeInsn(opcode, type);
                            return;
                        }
                        if (opcode == Opcodes.NEW && REPLACED.containsKey(type)) {
                            call(mv, "replaced", "()V");
                        }
                        super.visitTypeInsn(opcode, type);
                    }
                };
            }
        }, 0);
        return writer.toByteArray();
    }
}
