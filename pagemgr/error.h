/* error.h -- the error codes of the C core, and how a message travels with them.
 *
 * Purpose     Every function of the core that can fail returns 0 (QUIRE_OK) or one of the negative codes below.
 *             The message that explains it is kept per thread and read with quire_error_message().
 * Layout      none.
 * Invariants  I1 a function that returns a code other than QUIRE_OK and QUIRE_E_NOTFOUND has set the message.
 *             I2 result parameters are untouched when a function fails.
 * Ownership   The message belongs to the thread; it lives until that thread's next failing call.
 * Threads     Messages are thread local.
 * Errors      This is where they are.
 */
#ifndef QUIRE_ERROR_H
#define QUIRE_ERROR_H

/* name, value, one-line meaning: bindings map each to one exception class by this table. */
#define QUIRE_ERRORS(X)                                                                                                \
    X(NOTFOUND, -1, "no such key, page, set or snapshot")                                                              \
    X(EXISTS, -2, "the name is taken")                                                                                 \
    X(INVALID, -3, "an argument is outside what is allowed")                                                           \
    X(NOMEM, -4, "the system gave no memory")                                                                          \
    X(LIMIT, -5, "the memory limit is reached")                                                                        \
    X(NOSPACE, -6, "the disk is full")                                                                                 \
    X(IO, -7, "reading or writing failed")                                                                             \
    X(CORRUPT, -8, "the data breaks an invariant")                                                                     \
    X(VERSION, -9, "written by another version of the format")                                                         \
    X(BUSY, -10, "another writer holds the arena")                                                                     \
    X(CLOSED, -11, "used after close, after destroy or across a fork")                                                 \
    X(READONLY, -12, "a write through a read-only handle")                                                             \
    X(FULL, -13, "a structural limit is reached")                                                                      \
    X(MISMATCH, -14, "kind, page size or schema differs from what is stored")

enum {
    QUIRE_OK = 0,
#define QUIRE_ERROR_ENUM(name, value, text) QUIRE_E_##name = value,
    QUIRE_ERRORS(QUIRE_ERROR_ENUM)
#undef QUIRE_ERROR_ENUM
};

/* Formats the calling thread's message and returns code, so that a caller can write `return quire_fail(...)`. */
int quire_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* Says that the last message is why the next thing that is QUIRE_E_CORRUPT is so: for functions that can only return NULL. */
void quire_blame(void);

/* The calling thread's last message; never NULL. Valid until this thread's next failing call. */
const char *quire_error_message(void);

/* "LIMIT" for QUIRE_E_LIMIT and so on; "UNKNOWN" for anything else. A static string. */
const char *quire_error_name(int code);

#define QUIRE_TRY(call)                                                                                                \
    do {                                                                                                               \
        int quire_try_rc_ = (call);                                                                                    \
        if (quire_try_rc_ != QUIRE_OK) {                                                                               \
            return quire_try_rc_;                                                                                      \
        }                                                                                                              \
    } while (0)

#define QUIRE_LIKELY(x)   __builtin_expect(!!(x), 1)
#define QUIRE_UNLIKELY(x) __builtin_expect(!!(x), 0)

#endif
