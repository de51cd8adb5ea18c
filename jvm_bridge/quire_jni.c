/* quire_jni.c -- the core's functions as native methods of io.quire.spark.Native.
 *
 * Purpose     Carries arguments over and turns error codes into exceptions; nothing else happens here.
 * Layout      Native.scala declares the methods in the same order. Handles are pointers as jlong. Keys, values and answers lie outside
 *             the heap, as addresses; only file headers and frames, which go to streams, are byte arrays.
 * Invariants  I1 a method that fails has one exception pending and returns 0.
 *             I2 no exception of a caller's sink is replaced by one of ours.
 * Ownership   The Scala side closes what it opens; nothing is kept here but the class of our exception.
 * Threads     As the functions called.
 * Errors      QuireNativeException with the code and the message.
 */
#include <jni.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../checkpoint/cec.h"
#include "../checkpoint/container.h"
#include "../checkpoint/delta.h"
#include "../checkpoint/pages.h"
#include "../statestore/family.h"

#ifndef QUIRE_VERSION
#error "QUIRE_VERSION must name the version that the library is built as"
#endif

#define NATIVE(type, name)  JNIEXPORT type JNICALL Java_io_quire_spark_Native_00024_##name
#define HANDLE(type, value) ((type *)(intptr_t)(value))
#define BYTES(value)        ((const uint8_t *)(intptr_t)(value))

static jclass exception_class;
static jmethodID exception_constructor;

JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM *vm, void *reserved) {
    (void)reserved;
    JNIEnv *env;
    if ((*vm)->GetEnv(vm, (void **)&env, JNI_VERSION_1_8) != JNI_OK) {
        return JNI_ERR;
    }
    jclass found = (*env)->FindClass(env, "io/quire/spark/QuireNativeException");
    if (found == NULL) {
        return JNI_ERR;
    }
    exception_class = (*env)->NewGlobalRef(env, found);
    exception_constructor = (*env)->GetMethodID(env, found, "<init>", "(ILjava/lang/String;)V");
    return exception_class == NULL || exception_constructor == NULL ? JNI_ERR : JNI_VERSION_1_8;
}

/* True, with an exception pending, if rc is an error. */
static bool failed(JNIEnv *env, int rc) {
    if (rc == QUIRE_OK) {
        return false;
    }
    if (!(*env)->ExceptionCheck(env)) {
        jstring message = (*env)->NewStringUTF(env, quire_error_message());
        jobject exception =
            message == NULL ? NULL : (*env)->NewObject(env, exception_class, exception_constructor, (jint)rc, message);
        if (exception != NULL) {
            (*env)->Throw(env, exception);
        }
    }
    return true;
}

static jlong as_handle(void *pointer) {
    return (jlong)(intptr_t)pointer;
}

NATIVE(jstring, libraryVersion)(JNIEnv *env, jobject self) {
    (void)self;
    return (*env)->NewStringUTF(env, QUIRE_VERSION);
}

/* Not the lowest there is: a thread that gets next to nothing would keep others waiting at safepoints. Of the calling thread alone, on
 * Linux; lowering is always allowed. */
NATIVE(void, lowerPriority)(JNIEnv *env, jobject self) {
    (void)env;
    (void)self;
    setpriority(PRIO_PROCESS, 0, 19);
}

/* ------------------------------------------------------------------------------------------------ arenas and snapshots */

NATIVE(jobject, buffer)(JNIEnv *env, jobject self, jlong address, jlong count) {
    (void)self;
    return (*env)->NewDirectByteBuffer(env, HANDLE(void, address), count);
}

NATIVE(jlong, budgetCreate)(JNIEnv *env, jobject self, jlong bytes_max) {
    (void)self;
    quire_budget *budget = NULL;
    failed(env, quire_budget_create((uint64_t)bytes_max, &budget));
    return as_handle(budget);
}

NATIVE(jlong, budgetUsed)(JNIEnv *env, jobject self, jlong budget) {
    (void)env;
    (void)self;
    return (jlong)quire_budget_used(HANDLE(quire_budget, budget));
}

NATIVE(jlong, arenaOpen)(JNIEnv *env, jobject self, jint page_bytes, jlong budget) {
    (void)self;
    quire_arena *arena = NULL;
    quire_arena_options options = {
        .page_bytes = (uint32_t)page_bytes, .budget = HANDLE(quire_budget, budget), .in_place = true};
    failed(env, quire_arena_open(&options, &arena));
    return as_handle(arena);
}

NATIVE(void, arenaClose)(JNIEnv *env, jobject self, jlong arena) {
    (void)self;
    failed(env, quire_arena_close(HANDLE(quire_arena, arena)));
}

NATIVE(void, arenaCommit)(JNIEnv *env, jobject self, jlong arena) {
    (void)self;
    failed(env, quire_arena_commit(HANDLE(quire_arena, arena)));
}

NATIVE(void, arenaAbort)(JNIEnv *env, jobject self, jlong arena) {
    (void)self;
    failed(env, quire_arena_abort(HANDLE(quire_arena, arena)));
}

NATIVE(void, arenaRestore)(JNIEnv *env, jobject self, jlong arena, jlong snap) {
    (void)self;
    failed(env, quire_arena_restore(HANDLE(quire_arena, arena), HANDLE(quire_snap, snap)));
}

NATIVE(jlong, arenaEpoch)(JNIEnv *env, jobject self, jlong arena) {
    (void)env;
    (void)self;
    return quire_arena_epoch(HANDLE(quire_arena, arena));
}

NATIVE(jlong, arenaOrigin)(JNIEnv *env, jobject self, jlong arena) {
    (void)env;
    (void)self;
    quire_point origin;
    return quire_arena_origin(HANDLE(quire_arena, arena), &origin);
}

/* page bytes, frames used, dirty, retired, free, bytes held, bytes reserved, snapshots */
NATIVE(void, arenaStats)(JNIEnv *env, jobject self, jlong arena, jlong words) {
    (void)self;
    quire_stats stats;
    if (!failed(env, quire_arena_stats(HANDLE(quire_arena, arena), &stats))) {
        uint64_t *to = HANDLE(uint64_t, words);
        const uint64_t from[] = {stats.page_bytes,  stats.frames_used, stats.frames_dirty,   stats.frames_retired,
                                 stats.frames_free, stats.bytes_held,  stats.bytes_reserved, stats.snapshots};
        memcpy(to, from, sizeof from);
    }
}

NATIVE(jlong, snapEpoch)(JNIEnv *env, jobject self, jlong snap) {
    (void)env;
    (void)self;
    return quire_snap_epoch(HANDLE(quire_snap, snap));
}

NATIVE(jlong, snapAcquire)(JNIEnv *env, jobject self, jlong arena) {
    (void)self;
    quire_snap *snap = NULL;
    failed(env, quire_snap_acquire(HANDLE(quire_arena, arena), &snap));
    return as_handle(snap);
}

NATIVE(jlong, snapAcquireWeak)(JNIEnv *env, jobject self, jlong arena) {
    (void)self;
    quire_snap *snap = NULL;
    failed(env, quire_snap_acquire_weak(HANDLE(quire_arena, arena), &snap));
    return as_handle(snap);
}

NATIVE(void, snapRelease)(JNIEnv *env, jobject self, jlong snap) {
    (void)env;
    (void)self;
    quire_snap_release(HANDLE(quire_snap, snap));
}

/* ------------------------------------------------------------------------------------------------ families */

typedef int (*open_call)(void *where, const char *name, bool ordered, quire_family **family);

static int open_live(void *where, const char *name, bool ordered, quire_family **family) {
    return quire_family_open(where, name, ordered, family);
}

static int open_snap(void *where, const char *name, bool ordered, quire_family **family) {
    int rc = quire_family_open_snap(where, name, ordered, family);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc; /* 0 says so */
}

static jlong family_open(JNIEnv *env, open_call call, jlong where, jstring name, jboolean ordered) {
    quire_family *family = NULL;
    const char *chars = (*env)->GetStringUTFChars(env, name, NULL);
    if (chars != NULL) {
        int rc = call((void *)(intptr_t)where, chars, ordered, &family);
        (*env)->ReleaseStringUTFChars(env, name, chars);
        failed(env, rc);
    }
    return as_handle(family);
}

NATIVE(jlong, familyOpen)(JNIEnv *env, jobject self, jlong arena, jstring name, jboolean ordered) {
    (void)self;
    return family_open(env, open_live, arena, name, ordered);
}

NATIVE(jlong, familyOpenSnap)(JNIEnv *env, jobject self, jlong snap, jstring name, jboolean ordered) {
    (void)self;
    return family_open(env, open_snap, snap, name, ordered);
}

NATIVE(void, familyClose)(JNIEnv *env, jobject self, jlong family) {
    (void)env;
    (void)self;
    quire_family_close(HANDLE(quire_family, family));
}

NATIVE(void, familyDrop)(JNIEnv *env, jobject self, jlong arena, jstring name) {
    (void)self;
    const char *chars = (*env)->GetStringUTFChars(env, name, NULL);
    if (chars != NULL) {
        int rc = quire_set_destroy(HANDLE(quire_arena, arena), chars);
        (*env)->ReleaseStringUTFChars(env, name, chars);
        failed(env, rc);
    }
}

static jobjectArray names_of(JNIEnv *env, const quire_set_info *infos, size_t count) {
    jclass string_class = (*env)->FindClass(env, "java/lang/String");
    jobjectArray names = string_class == NULL ? NULL : (*env)->NewObjectArray(env, (jsize)count, string_class, NULL);
    for (size_t i = 0; i < count && names != NULL; i++) {
        jstring name = (*env)->NewStringUTF(env, infos[i].name);
        if (name == NULL) {
            return NULL;
        }
        (*env)->SetObjectArrayElement(env, names, (jsize)i, name);
        (*env)->DeleteLocalRef(env, name);
    }
    return names;
}

static int infos_get(jlong arena, jlong snap, quire_set_info *infos, size_t max, size_t *count) {
    return snap != 0 ? quire_snap_list(HANDLE(quire_snap, snap), infos, max, count)
                     : quire_set_list(HANDLE(quire_arena, arena), infos, max, count);
}

/* Of the snapshot, or if it is 0 of the state being written. */
NATIVE(jobjectArray, familyNames)(JNIEnv *env, jobject self, jlong arena, jlong snap) {
    (void)self;
    size_t count = 0, max;
    if (failed(env, infos_get(arena, snap, NULL, 0, &count))) {
        return NULL;
    }
    max = count;
    quire_set_info *infos = malloc((max + 1) * sizeof *infos);
    int rc = infos == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory for the names of %zu families", max)
                           : infos_get(arena, snap, infos, max, &count);
    jobjectArray names = failed(env, rc) ? NULL : names_of(env, infos, count < max ? count : max);
    free(infos);
    return names;
}

NATIVE(jlong, familyCount)(JNIEnv *env, jobject self, jlong family) {
    (void)self;
    uint64_t count = 0;
    failed(env, quire_family_count(HANDLE(quire_family, family), &count));
    return (jlong)count;
}

NATIVE(jboolean, get)(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes, jlong span) {
    (void)self;
    int rc = quire_family_get(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes, HANDLE(quire_span, span));
    return rc != QUIRE_E_NOTFOUND && !failed(env, rc);
}

NATIVE(jint, getMany)
(JNIEnv *env, jobject self, jlong family, jlong keys, jlong key_offsets, jint first, jint count, jlong spans) {
    (void)self;
    size_t done = 0;
    failed(env, quire_family_get_many(HANDLE(quire_family, family), BYTES(keys), HANDLE(const int32_t, key_offsets),
                                      (size_t)first, (size_t)count, HANDLE(quire_span, spans), &done));
    return (jint)done;
}

NATIVE(jboolean, getAll)(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes, jlong span) {
    (void)self;
    int rc =
        quire_family_get_all(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes, HANDLE(quire_span, span));
    return rc != QUIRE_E_NOTFOUND && !failed(env, rc);
}

NATIVE(jboolean, contains)(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes) {
    (void)self;
    bool found = false;
    failed(env, quire_family_contains(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes, &found));
    return found;
}

NATIVE(void, put)
(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes, jlong value, jint value_bytes) {
    (void)self;
    failed(env, quire_family_put(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes, BYTES(value),
                                 (size_t)value_bytes));
}

NATIVE(void, putMany)
(JNIEnv *env, jobject self, jlong family, jlong keys, jlong key_offsets, jlong values, jlong value_offsets,
 jint count) {
    (void)self;
    failed(env, quire_family_put_many(HANDLE(quire_family, family), BYTES(keys), HANDLE(const int32_t, key_offsets),
                                      BYTES(values), HANDLE(const int32_t, value_offsets), (size_t)count));
}

NATIVE(void, append)
(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes, jlong value, jint value_bytes) {
    (void)self;
    failed(env, quire_family_append(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes, BYTES(value),
                                    (size_t)value_bytes));
}

NATIVE(void, remove)(JNIEnv *env, jobject self, jlong family, jlong key, jint key_bytes) {
    (void)self;
    failed(env, quire_family_remove(HANDLE(quire_family, family), BYTES(key), (size_t)key_bytes));
}

NATIVE(void, removeRange)
(JNIEnv *env, jobject self, jlong family, jlong lo, jint lo_bytes, jlong hi, jint hi_bytes) {
    (void)self;
    failed(env, quire_family_remove_range(HANDLE(quire_family, family), BYTES(lo), (size_t)lo_bytes, BYTES(hi),
                                          (size_t)hi_bytes));
}

NATIVE(jlong, scanOpen)
(JNIEnv *env, jobject self, jlong family, jlong lo, jint lo_bytes, jlong hi, jint hi_bytes, jboolean all) {
    (void)self;
    quire_scan *scan = NULL;
    failed(env, quire_scan_open(HANDLE(quire_family, family), BYTES(lo), (size_t)lo_bytes, BYTES(hi), (size_t)hi_bytes,
                                all, &scan));
    return as_handle(scan);
}

NATIVE(jint, scanNext)(JNIEnv *env, jobject self, jlong scan, jlong rows, jint max) {
    (void)self;
    size_t count = 0;
    failed(env, quire_scan_next(HANDLE(quire_scan, scan), HANDLE(quire_span_pair, rows), (size_t)max, &count));
    return (jint)count;
}

NATIVE(void, scanClose)(JNIEnv *env, jobject self, jlong scan) {
    (void)env;
    (void)self;
    quire_scan_close(HANDLE(quire_scan, scan));
}

/* ------------------------------------------------------------------------------------------------ deltas and images */

typedef struct {
    JNIEnv *env;
    jobject sink;
    jmethodID write;
} java_sink;

static bool sink_open(JNIEnv *env, jobject object, java_sink *sink) {
    *sink = (java_sink){env, object, (*env)->GetMethodID(env, (*env)->GetObjectClass(env, object), "write", "(JJ)V")};
    return sink->write != NULL;
}

static int sink_write(java_sink *sink, const void *bytes, size_t count) {
    (*sink->env)->CallVoidMethod(sink->env, sink->sink, sink->write, (jlong)(intptr_t)bytes, (jlong)count);
    return (*sink->env)->ExceptionCheck(sink->env) ? quire_fail(QUIRE_E_IO, "the sink threw an exception") : QUIRE_OK;
}

static int delta_sink(void *context, const uint8_t *payload, size_t count) {
    return sink_write(context, payload, count);
}

static int image_sink(void *context, const void *bytes, size_t count) {
    return sink_write(context, bytes, count);
}

/* The names in an array of strings, each to be given back; fewer than count if one could not be had. */
static jsize names_get(JNIEnv *env, jobjectArray strings, const char **names, jsize count) {
    for (jsize i = 0; i < count; i++) {
        jstring string = (*env)->GetObjectArrayElement(env, strings, i);
        names[i] = string == NULL ? NULL : (*env)->GetStringUTFChars(env, string, NULL);
        if (names[i] == NULL) {
            return i;
        }
    }
    return count;
}

static void names_give_back(JNIEnv *env, jobjectArray strings, const char **names, jsize count) {
    for (jsize i = 0; i < count; i++) {
        (*env)->ReleaseStringUTFChars(env, (*env)->GetObjectArrayElement(env, strings, i), names[i]);
    }
}

NATIVE(void, deltaWrite)(JNIEnv *env, jobject self, jlong arena, jlong older, jobjectArray lists, jobject object) {
    (void)self;
    jsize count = (*env)->GetArrayLength(env, lists);
    const char **names = calloc((size_t)count + 1, sizeof *names);
    if (names == NULL) {
        failed(env, quire_fail(QUIRE_E_NOMEM, "no memory for the names of %d families", (int)count));
        return;
    }
    jsize got = names_get(env, lists, names, count);
    java_sink sink;
    int rc = QUIRE_OK;
    if (got == count && sink_open(env, object, &sink)) {
        rc = quire_delta_write(HANDLE(quire_arena, arena), HANDLE(quire_snap, older), names, (size_t)count, delta_sink,
                               &sink);
    }
    names_give_back(env, lists, names, got);
    free(names);
    failed(env, rc);
}

NATIVE(void, deltaApply)(JNIEnv *env, jobject self, jlong arena, jlong payload, jlong count) {
    (void)self;
    failed(env, quire_delta_apply(HANDLE(quire_arena, arena), BYTES(payload), (size_t)count));
}

/* words: where the next record is, where the payload ends; then op, kind, key address, bytes, value address, bytes, count. */
NATIVE(jboolean, deltaNext)(JNIEnv *env, jobject self, jlong words) {
    (void)self;
    int64_t *at = HANDLE(int64_t, words);
    quire_delta_reader reader = {BYTES(at[0]), BYTES(at[1])};
    quire_delta_record record;
    int rc = quire_delta_next(&reader, &record);
    if (rc == QUIRE_E_NOTFOUND || failed(env, rc)) {
        return JNI_FALSE;
    }
    const int64_t result[] = {(int64_t)(intptr_t)reader.next,
                              at[1],
                              (int64_t)record.op,
                              (int64_t)record.kind,
                              (int64_t)(intptr_t)record.key,
                              (int64_t)record.key_bytes,
                              (int64_t)(intptr_t)record.value,
                              (int64_t)record.value_bytes,
                              (int64_t)record.value_count};
    memcpy(at, result, sizeof result);
    return JNI_TRUE;
}

NATIVE(void, imageWrite)(JNIEnv *env, jobject self, jlong snap, jobject object) {
    (void)self;
    java_sink sink;
    if (sink_open(env, object, &sink)) {
        failed(env, quire_snap_write(HANDLE(quire_snap, snap), image_sink, &sink));
    }
}

NATIVE(jlong, imageBegin)(JNIEnv *env, jobject self, jlong budget, jlong count, jstring name) {
    (void)self;
    quire_image *image = NULL;
    quire_arena_options options = {.budget = HANDLE(quire_budget, budget), .in_place = true};
    const char *chars = (*env)->GetStringUTFChars(env, name, NULL);
    if (chars != NULL) {
        int rc = quire_image_begin(&options, (uint64_t)count, chars, &image);
        (*env)->ReleaseStringUTFChars(env, name, chars);
        failed(env, rc);
    }
    return as_handle(image);
}

NATIVE(jlong, imageRoom)(JNIEnv *env, jobject self, jlong image) {
    (void)env;
    (void)self;
    return as_handle(quire_image_room(HANDLE(quire_image, image)));
}

NATIVE(void, imageFilled)(JNIEnv *env, jobject self, jlong image, jlong start, jlong count) {
    (void)self;
    failed(env, quire_image_filled(HANDLE(quire_image, image), (uint64_t)start, (uint64_t)count));
}

NATIVE(jlong, imageEnd)(JNIEnv *env, jobject self, jlong image) {
    (void)self;
    quire_image *ended = HANDLE(quire_image, image);
    quire_arena *arena = NULL;
    failed(env, quire_image_end(&ended, &arena));
    return as_handle(arena);
}

NATIVE(void, imageCancel)(JNIEnv *env, jobject self, jlong image) {
    (void)env;
    (void)self;
    quire_image *cancelled = HANDLE(quire_image, image);
    quire_image_cancel(&cancelled);
}

NATIVE(jlong, imageMap)(JNIEnv *env, jobject self, jlong budget, jstring path) {
    (void)self;
    quire_arena *arena = NULL;
    quire_arena_options options = {.budget = HANDLE(quire_budget, budget), .in_place = true};
    const char *chars = (*env)->GetStringUTFChars(env, path, NULL);
    if (chars != NULL) {
        int rc = quire_image_map(&options, chars, &arena);
        (*env)->ReleaseStringUTFChars(env, path, chars);
        failed(env, rc);
    }
    return as_handle(arena);
}

NATIVE(void, pagesWrite)(JNIEnv *env, jobject self, jlong arena, jlong since, jobject object) {
    (void)self;
    java_sink sink;
    if (sink_open(env, object, &sink)) {
        failed(env, quire_pages_write(HANDLE(quire_arena, arena), (uint32_t)since, delta_sink, &sink));
    }
}

NATIVE(jlong, pagesBytes)(JNIEnv *env, jobject self, jlong arena, jlong since) {
    (void)self;
    uint64_t bytes = 0;
    failed(env, quire_pages_bytes(HANDLE(quire_arena, arena), (uint32_t)since, &bytes));
    return (jlong)bytes;
}

NATIVE(void, pagesApply)(JNIEnv *env, jobject self, jlong arena, jlong payload, jlong count) {
    (void)self;
    failed(env, quire_pages_apply(HANDLE(quire_arena, arena), BYTES(payload), (size_t)count));
}

/* ------------------------------------------------------------------------------------------------ logs */

NATIVE(jlong, logCreate)
(JNIEnv *env, jobject self, jlong arena, jdouble extent_target, jlong bytes_max, jlong nanos_max) {
    (void)self;
    quire_cec *log = NULL;
    quire_cec_policy policy = {extent_target, (uint64_t)bytes_max, (uint64_t)nanos_max};
    failed(env, quire_cec_create(HANDLE(quire_arena, arena), &policy, &log));
    return as_handle(log);
}

NATIVE(void, logDestroy)(JNIEnv *env, jobject self, jlong log) {
    (void)env;
    (void)self;
    quire_cec_destroy(HANDLE(quire_cec, log));
}

/* words: as quire_cec_summary has them */
NATIVE(void, logWrite)
(JNIEnv *env, jobject self, jlong log, jlong older, jlong version, jobject object, jlong words) {
    (void)self;
    java_sink sink;
    quire_cec_summary summary;
    if (sink_open(env, object, &sink) &&
        !failed(env, quire_cec_write(HANDLE(quire_cec, log), HANDLE(quire_snap, older), (uint64_t)version, delta_sink,
                                     &sink, &summary))) {
        memcpy(HANDLE(uint64_t, words), &summary, sizeof summary);
    }
}

NATIVE(void, logCommitted)(JNIEnv *env, jobject self, jlong log) {
    (void)self;
    failed(env, quire_cec_committed(HANDLE(quire_cec, log)));
}

NATIVE(void, logApply)(JNIEnv *env, jobject self, jlong log, jlong payload, jlong count) {
    (void)self;
    failed(env, quire_cec_apply(HANDLE(quire_cec, log), BYTES(payload), (size_t)count));
}

NATIVE(void, logLoaded)(JNIEnv *env, jobject self, jlong log, jlong version) {
    (void)self;
    failed(env, quire_cec_loaded(HANDLE(quire_cec, log), (uint64_t)version));
}

NATIVE(void, logComplete)(JNIEnv *env, jobject self, jlong log, jlong keys) {
    (void)self;
    failed(env, quire_cec_complete(HANDLE(quire_cec, log), (uint64_t)keys));
}

NATIVE(void, logForeign)(JNIEnv *env, jobject self, jlong log, jlong version) {
    (void)self;
    failed(env, quire_cec_foreign(HANDLE(quire_cec, log), (uint64_t)version));
}

NATIVE(void, logRestored)(JNIEnv *env, jobject self, jlong log, jlong version) {
    (void)self;
    failed(env, quire_cec_restored(HANDLE(quire_cec, log), (uint64_t)version));
}

/* ------------------------------------------------------------------------------------------------ files */

static int text_of(JNIEnv *env, jbyteArray array, uint8_t *memory, size_t *used, quire_text *text) {
    jsize count = (*env)->GetArrayLength(env, array);
    if (*used + (size_t)count > QUIRE_FILE_HEADER_BYTES_MAX) {
        return quire_fail(QUIRE_E_INVALID, "the names in a checkpoint file's header take more than %u bytes",
                          QUIRE_FILE_HEADER_BYTES_MAX);
    }
    (*env)->GetByteArrayRegion(env, array, 0, count, (jbyte *)memory + *used);
    *text = (quire_text){(const char *)memory + *used, (size_t)count};
    *used += (size_t)count;
    return QUIRE_OK;
}

static jbyteArray array_of(JNIEnv *env, const uint8_t *bytes, size_t count) {
    jbyteArray array = (*env)->NewByteArray(env, (jsize)count);
    if (array != NULL) {
        (*env)->SetByteArrayRegion(env, array, 0, (jsize)count, (const jbyte *)bytes);
    }
    return array;
}

/* numbers: kind, version, parent version, operator id, partition id, page bytes, flags. texts: store name, id, parent id, codec. */
NATIVE(jbyteArray, headerEncode)(JNIEnv *env, jobject self, jlong numbers, jobjectArray texts) {
    (void)self;
    const int64_t *number = HANDLE(const int64_t, numbers);
    quire_file_header header = {.kind = (quire_file_kind)number[0],
                                .version = (uint64_t)number[1],
                                .parent_version = (uint64_t)number[2],
                                .operator_id = (uint64_t)number[3],
                                .partition_id = (uint32_t)number[4],
                                .page_bytes = (uint32_t)number[5],
                                .flags = (uint32_t)number[6]};
    quire_text *to[] = {&header.store_name, &header.id, &header.parent_id, &header.codec};
    uint8_t memory[QUIRE_FILE_HEADER_BYTES_MAX], bytes[QUIRE_FILE_HEADER_BYTES_MAX];
    size_t used = 0;
    int rc = QUIRE_OK;
    for (jsize i = 0; i < 4 && rc == QUIRE_OK; i++) {
        rc = text_of(env, (*env)->GetObjectArrayElement(env, texts, i), memory, &used, to[i]);
    }
    if (rc == QUIRE_OK) {
        rc = quire_file_header_encode(&header, bytes, sizeof bytes);
    }
    return failed(env, rc) ? NULL : array_of(env, bytes, (size_t)quire_file_header_bytes(&header));
}

static size_t header_copy(JNIEnv *env, jbyteArray array, uint8_t *bytes) {
    jsize count = (*env)->GetArrayLength(env, array);
    count = count < (jsize)QUIRE_FILE_HEADER_BYTES_MAX ? count : (jsize)QUIRE_FILE_HEADER_BYTES_MAX;
    (*env)->GetByteArrayRegion(env, array, 0, count, (jbyte *)bytes);
    return (size_t)count;
}

NATIVE(jint, headerPeek)(JNIEnv *env, jobject self, jbyteArray array) {
    (void)self;
    uint8_t bytes[QUIRE_FILE_HEADER_BYTES_MAX];
    int rc = quire_file_header_peek(bytes, header_copy(env, array, bytes));
    return rc < 0 && failed(env, rc) ? 0 : rc;
}

/* Writes the numbers and gives the texts, both as headerEncode takes them. */
NATIVE(jobjectArray, headerDecode)(JNIEnv *env, jobject self, jbyteArray array, jlong numbers) {
    (void)self;
    uint8_t bytes[QUIRE_FILE_HEADER_BYTES_MAX];
    quire_file_header header;
    if (failed(env, quire_file_header_decode(bytes, header_copy(env, array, bytes), &header))) {
        return NULL;
    }
    const int64_t number[] = {header.kind,
                              (int64_t)header.version,
                              (int64_t)header.parent_version,
                              (int64_t)header.operator_id,
                              header.partition_id,
                              header.page_bytes,
                              header.flags};
    memcpy(HANDLE(int64_t, numbers), number, sizeof number);
    const quire_text *from[] = {&header.store_name, &header.id, &header.parent_id, &header.codec};
    jclass bytes_class = (*env)->FindClass(env, "[B");
    jobjectArray texts = bytes_class == NULL ? NULL : (*env)->NewObjectArray(env, 4, bytes_class, NULL);
    for (jsize i = 0; i < 4 && texts != NULL; i++) {
        jbyteArray text = array_of(env, (const uint8_t *)from[i]->bytes, from[i]->count);
        if (text == NULL) {
            return NULL;
        }
        (*env)->SetObjectArrayElement(env, texts, i, text);
    }
    return texts;
}

NATIVE(void, frameEncode)
(JNIEnv *env, jobject self, jint kind, jint raw_bytes, jbyteArray stored, jint stored_bytes, jbyteArray frame) {
    (void)self;
    uint8_t bytes[QUIRE_FRAME_HEADER_BYTES];
    void *from = (*env)->GetPrimitiveArrayCritical(env, stored, NULL);
    if (from == NULL) {
        return;
    }
    int rc = quire_frame_encode((quire_frame_kind)kind, (uint32_t)raw_bytes, from, (size_t)stored_bytes, bytes);
    (*env)->ReleasePrimitiveArrayCritical(env, stored, from, JNI_ABORT);
    if (!failed(env, rc)) {
        (*env)->SetByteArrayRegion(env, frame, 0, sizeof bytes, (const jbyte *)bytes);
    }
}

/* words: kind, raw bytes, stored bytes, checksum */
NATIVE(void, frameDecode)(JNIEnv *env, jobject self, jbyteArray array, jlong words) {
    (void)self;
    uint8_t bytes[QUIRE_FRAME_HEADER_BYTES];
    quire_frame_header frame;
    (*env)->GetByteArrayRegion(env, array, 0, sizeof bytes, (jbyte *)bytes);
    if (!(*env)->ExceptionCheck(env) && !failed(env, quire_frame_decode(bytes, &frame))) {
        const int64_t word[] = {frame.kind, frame.raw_bytes, frame.stored_bytes, frame.crc};
        memcpy(HANDLE(int64_t, words), word, sizeof word);
    }
}

NATIVE(void, frameVerify)(JNIEnv *env, jobject self, jlong words, jbyteArray stored) {
    (void)self;
    const int64_t *word = HANDLE(const int64_t, words);
    quire_frame_header frame = {(quire_frame_kind)word[0], (uint32_t)word[1], (uint32_t)word[2], (uint32_t)word[3]};
    if ((*env)->GetArrayLength(env, stored) < (jsize)frame.stored_bytes) {
        failed(env, quire_fail(QUIRE_E_INVALID, "fewer bytes than the frame has"));
        return;
    }
    void *from = (*env)->GetPrimitiveArrayCritical(env, stored, NULL);
    if (from == NULL) {
        return;
    }
    int rc = quire_frame_verify(&frame, from);
    (*env)->ReleasePrimitiveArrayCritical(env, stored, from, JNI_ABORT);
    failed(env, rc);
}

NATIVE(jbyteArray, endEncode)
(JNIEnv *env, jobject self, jlong frames, jlong raw_bytes, jlong keys, jlong since) {
    (void)self;
    uint8_t bytes[QUIRE_FRAME_END_BYTES];
    quire_file_end end = {(uint64_t)frames, (uint64_t)raw_bytes, (uint64_t)keys, (uint64_t)since};
    quire_file_end_encode(&end, bytes);
    return array_of(env, bytes, sizeof bytes);
}

/* words: frames, raw bytes, keys, since */
NATIVE(void, endDecode)(JNIEnv *env, jobject self, jbyteArray array, jlong words) {
    (void)self;
    uint8_t bytes[QUIRE_FRAME_END_BYTES];
    jsize count = (*env)->GetArrayLength(env, array);
    quire_file_end end;
    (*env)->GetByteArrayRegion(env, array, 0, count < (jsize)sizeof bytes ? count : (jsize)sizeof bytes,
                               (jbyte *)bytes);
    if (!failed(env, quire_file_end_decode(bytes, (size_t)count, &end))) {
        const int64_t word[] = {(int64_t)end.frames, (int64_t)end.raw_bytes, (int64_t)end.keys, (int64_t)end.since};
        memcpy(HANDLE(int64_t, words), word, sizeof word);
    }
}
