/* error.c -- the thread-local message behind every error code (contract in error.h). */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[1024];

int quire_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return code;
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
