/* error.c -- the thread-local message behind every error code (contract in error.h). */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[1024];
static _Thread_local char cause[512];

int quire_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int count = vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (cause[0] != 0) {
        if (code == QUIRE_E_CORRUPT && count >= 0 && (size_t)count < sizeof message) {
            snprintf(message + count, sizeof message - (size_t)count, ": %s", cause);
        }
        cause[0] = 0;
    }
    return code;
}

void quire_blame(void) {
    snprintf(cause, sizeof cause, "%.*s", (int)sizeof cause - 1, message);
}

const char *quire_error_message(void) {
    return message;
}

const char *quire_error_name(int code) {
    switch (code) {
#define QUIRE_ERROR_CASE(name, value, text)                                                                            \
    case value:                                                                                                        \
        return #name;
        QUIRE_ERRORS(QUIRE_ERROR_CASE)
#undef QUIRE_ERROR_CASE
    default:
        return "UNKNOWN";
    }
}
