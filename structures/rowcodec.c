/* rowcodec.c -- typed rows to bytes and back (contract in rowcodec.h).
 *
 * Purpose     Two encodings of the rows of an Arrow struct array. Ordered (keys): columns one behind the other, each
 *             sorting as bytes. Plain (values): null bits, then all fixed-width columns at constant places, then the
 *             rest.
 *
 * Layout      docs/typed-records.md gives every byte. In short, ordered:
 *             nullable column   00 for null, else 01 and the value
 *             integer, decimal  big endian, top bit turned if signed          float   its bits made to sort
 *             bool, raw         one byte 00 or 01; the bytes as they are      struct  its columns
 *             bytes, string     00 as 01 01, 01 as 01 02, others as they are; then 00
 *             list              01 and the item for each, then 00             fixed-size list  its items
 *             plain:
 *             struct            null bits (1 = null) of nullable columns, fixed-width columns in little endian
 *                               (zeros if null), then each other column that is not null
 *             bytes, string     varint length, bytes
 *             list              varint count, items        fixed-size list  items
 *             items             null bits if items may be null or empty, then as the columns of a struct
 *
 * Invariants  I1 to I4 of rowcodec.h.
 *             I5 rows are worked on in blocks of BLOCK_ROWS, column by column, so that each inner loop has one type.
 *             I6 what measure_* adds up is exactly what write_* then writes.
 *             I7 a list's count is checked against the bytes left before anything is allocated for it, so that memory
 *                stays within a constant factor (given by the schema) of the input.
 *
 * Ownership   A codec owns its fields in two blocks (fields, text). Decode collects buffers in builders and hands them
 *             over to the Arrow arrays at the end; on failure it frees them itself.
 * Threads     No state outside the arguments.
 * Errors      A fault found in the middle of a block is reported with its row and the path of its column.
 */
#include "rowcodec.h"

#include <stdio.h>
#include <stdlib.h>

#include "kv_internal.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Arrow buffers are read in place as little endian");

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK_ROWS = 512, DEPTH_MAX = 32, PATH_BYTES_MAX = 512, VALUE_COUNT_MAX = 1 << 24, BUFFER_ALIGNMENT = 64 };

typedef enum {
    FORM_NULL,
    FORM_BOOL,
    FORM_INTEGER,
    FORM_FLOAT,
    FORM_DECIMAL,
    FORM_RAW,
    FORM_BYTES,
    FORM_LIST,
    FORM_FIXED_LIST,
    FORM_STRUCT,
} field_form;

typedef struct field {
    const char *path;
    const char *format;
    struct field *children;
    uint32_t child_count;
    uint32_t index; /* of its source or builder */
    field_form form;
    bool nullable;
    bool utf8;
    bool large;          /* 64-bit offsets */
    uint8_t sign;        /* what the first ordered byte is turned by */
    uint32_t null_bit;   /* plain: its bit among those of its struct */
    size_t width;        /* bytes of a fixed-width value, encoded; in Arrow's buffer too, but for bool */
    size_t fixed_offset; /* plain: from the start of its struct */
    int64_t item_count;  /* of a fixed-size list */
    int64_t value_count; /* how many Arrow values one null of this takes, items of fixed-size lists included */
    uint32_t bit_count;  /* plain, struct: null bits */
    size_t head_bytes;   /* plain, struct: null bits and fixed-width columns */
    size_t bytes_min;    /* plain: the fewest bytes that a value, not null, takes */
} field;

struct quire_codec {
    field *fields; /* fields[0] is the row */
    char *text;    /* paths and formats */
    uint32_t field_count;
    bool ordered;
};

static bool is_fixed(const field *f) {
    return f->form >= FORM_BOOL && f->form <= FORM_RAW;
}

/* The fewest bytes of an item in a plain list, and whether items have null bits: they must if they could take no bytes
 * (I7). */
static size_t item_bytes_min(const field *f) {
    return is_fixed(f) ? f->width : f->nullable ? 0 : f->bytes_min;
}
static bool items_have_bits(const field *f) {
    return f->nullable || item_bytes_min(f) == 0;
}

static size_t bitmap_bytes(uint64_t bit_count) {
    return (size_t)(bit_count / 8 + (bit_count % 8 != 0));
}
static bool bit_get(const uint8_t *bits, int64_t i) {
    return bits[i >> 3] >> (i & 7) & 1;
}
static void bit_set(uint8_t *bits, int64_t i) {
    bits[i >> 3] = (uint8_t)(bits[i >> 3] | 1u << (i & 7));
}
static void bit_clear(uint8_t *bits, int64_t i) {
    bits[i >> 3] = (uint8_t)(bits[i >> 3] & ~(1u << (i & 7)));
}

/* ------------------------------------------------------------------------------------------------ numbers */

INLINE uint64_t load(const uint8_t *p, unsigned width) {
    uint64_t x = 0;
    memcpy(&x, p, width);
    return x;
}
INLINE void store(uint8_t *p, uint64_t x, unsigned width) {
    memcpy(p, &x, width);
}
INLINE uint64_t swap(uint64_t x, unsigned width) {
    return __builtin_bswap64(x) >> (64 - 8 * width);
}
INLINE uint64_t sign_of(unsigned width) {
    return 1ull << (8 * width - 1);
}

/* Bits of infinity, and of the one NaN that all others become in a key. */
INLINE uint64_t infinity_of(unsigned width) {
    return width == 2 ? 0x7C00u : width == 4 ? 0x7F800000u : 0x7FF0000000000000ull;
}
INLINE uint64_t nan_of(unsigned width) {
    return width == 2 ? 0x7E00u : width == 4 ? 0x7FC00000u : 0x7FF8000000000000ull;
}

INLINE uint64_t float_to_ordered(uint64_t x, unsigned width) {
    uint64_t sign = sign_of(width);
    if ((x & ~sign) > infinity_of(width)) {
        x = nan_of(width);
    }
    if (x == sign) {
        x = 0;
    }
    return (x & sign) != 0 ? ~x : x | sign;
}

/* False if no encode makes these bits. */
INLINE bool float_from_ordered(uint64_t ordered, unsigned width, uint64_t *bits) {
    uint64_t sign = sign_of(width);
    uint64_t mask = sign | (sign - 1);
    uint64_t x = (ordered & sign) != 0 ? ordered ^ sign : ~ordered & mask;
    *bits = x;
    return x != sign && ((x & ~sign) <= infinity_of(width) || x == nan_of(width));
}

static void reverse_bytes(uint8_t *to, const uint8_t *from, size_t width) {
    for (size_t i = 0; i < width; i++) {
        to[i] = from[width - 1 - i];
    }
}

static size_t varint_bytes(uint64_t x) {
    size_t n = 1;
    for (; x >= 0x80; x >>= 7) {
        n++;
    }
    return n;
}
static uint8_t *varint_write(uint8_t *p, uint64_t x) {
    for (; x >= 0x80; x >>= 7) {
        *p++ = (uint8_t)(x | 0x80);
    }
    *p++ = (uint8_t)x;
    return p;
}
/* Takes only the shortest form, and values below 2^63. */
static bool varint_read(const uint8_t **at, const uint8_t *end, uint64_t *value) {
    uint64_t x = 0;
    for (unsigned shift = 0; shift < 63 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        x |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *value = x;
            return byte != 0 || shift == 0;
        }
    }
    return false;
}

/* ------------------------------------------------------------------------------------------------ text */

#define EACH_BYTE(x) (0x0101010101010101ull * (x))

/* Bytes 00 and 01: those that an ordered string escapes. The test on a word may find too much, so bytes are counted. */
static size_t count_low(const uint8_t *bytes, size_t count) {
    size_t low = 0, i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t x = load(bytes + i, 8);
        if (QUIRE_UNLIKELY(((x - EACH_BYTE(2)) & ~x & EACH_BYTE(0x80)) != 0)) {
            for (size_t j = i; j < i + 8; j++) {
                low += bytes[j] < 2;
            }
        }
    }
    for (; i < count; i++) {
        low += bytes[i] < 2;
    }
    return low;
}

/* Bytes of the UTF-8 sequence at p, which is not ASCII; 0 if it is overlong, a surrogate, too high or cut. */
static size_t utf8_sequence(const uint8_t *p, size_t count) {
    uint8_t a = p[0], low = 0x80, high = 0xBF;
    size_t n = a >= 0xF0 ? 4 : a >= 0xE0 ? 3 : 2;
    if (a < 0xC2 || a > 0xF4 || count < n) {
        return 0;
    }
    if (a == 0xE0) {
        low = 0xA0;
    } else if (a == 0xED) {
        high = 0x9F;
    } else if (a == 0xF0) {
        low = 0x90;
    } else if (a == 0xF4) {
        high = 0x8F;
    }
    if (p[1] < low || p[1] > high) {
        return 0;
    }
    for (size_t i = 2; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return n;
}

static bool utf8_valid(const uint8_t *bytes, size_t count) {
    size_t i = 0;
    while (i < count) {
        if (i + 8 <= count && (load(bytes + i, 8) & EACH_BYTE(0x80)) == 0) {
            i += 8;
        } else if (bytes[i] < 0x80) {
            i++;
        } else {
            size_t n = utf8_sequence(bytes + i, count - i);
            if (n == 0) {
                return false;
            }
            i += n;
        }
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------ schema */

typedef struct {
    quire_codec *codec;
    size_t text_count;
} schema_builder;

static const char *unsupported_name(const struct ArrowSchema *schema) {
    static const struct {
        const char *format, *name;
    } names[] = {{"vu", "string_view"},
                 {"vz", "binary_view"},
                 {"tiM", "month_interval"},
                 {"tiD", "day_time_interval"},
                 {"tin", "month_day_nano_interval"},
                 {"+vl", "list_view"},
                 {"+vL", "large_list_view"},
                 {"+r", "run_end_encoded"},
                 {"+m", "map"},
                 {"+ud", "dense_union"},
                 {"+us", "sparse_union"}};
    if (schema->dictionary != NULL) {
        return "dictionary";
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strncmp(schema->format, names[i].format, strlen(names[i].format)) == 0) {
            return names[i].name;
        }
    }
    return "unknown";
}

static int unsupported(const field *f, const struct ArrowSchema *schema, bool ordered) {
    return quire_fail(
        QUIRE_E_INVALID,
        "column '%s' is of Arrow type %s (format '%s'), which a %s cannot hold; supported are null, bool, "
        "int8 to int64, uint8 to uint64, float16 to float64, decimal32 to decimal256, date32, date64, time32, "
        "time64, timestamp, duration, string, large_string, binary, large_binary, fixed_size_binary, struct, "
        "list, large_list, fixed_size_list%s",
        f->path, unsupported_name(schema), schema->format, ordered ? "key" : "value", ordered ? "" : " and map");
}

static bool set_fixed(field *f, field_form form, size_t width, bool is_signed) {
    f->form = form;
    f->width = width;
    f->sign = is_signed ? 0x80 : 0;
    return true;
}

static bool parse_letter(field *f, char letter) {
    switch (letter) {
    case 'n':
        f->form = FORM_NULL;
        f->nullable = true;
        return true;
    case 'b':
        return set_fixed(f, FORM_BOOL, 1, false);
    case 'c':
    case 'C':
        return set_fixed(f, FORM_INTEGER, 1, letter == 'c');
    case 's':
    case 'S':
        return set_fixed(f, FORM_INTEGER, 2, letter == 's');
    case 'i':
    case 'I':
        return set_fixed(f, FORM_INTEGER, 4, letter == 'i');
    case 'l':
    case 'L':
        return set_fixed(f, FORM_INTEGER, 8, letter == 'l');
    case 'e':
        return set_fixed(f, FORM_FLOAT, 2, true);
    case 'f':
        return set_fixed(f, FORM_FLOAT, 4, true);
    case 'g':
        return set_fixed(f, FORM_FLOAT, 8, true);
    case 'u':
    case 'U':
    case 'z':
    case 'Z':
        f->form = FORM_BYTES;
        f->utf8 = letter == 'u' || letter == 'U';
        f->large = letter == 'U' || letter == 'Z';
        f->bytes_min = 1;
        return true;
    default:
        return false;
    }
}

static bool parse_decimal(field *f, const char *format) {
    int precision, scale, bits = 128;
    if (sscanf(format, "d:%d,%d,%d", &precision, &scale, &bits) < 2) {
        return false;
    }
    switch (bits) {
    case 32:
    case 64:
        return set_fixed(f, FORM_INTEGER, (size_t)bits / 8, true);
    case 128:
    case 256:
        return set_fixed(f, FORM_DECIMAL, (size_t)bits / 8, true);
    default:
        return false;
    }
}

static bool parse_temporal(field *f, const char *format) {
    switch (format[1]) {
    case 'd': /* date: days in 32 bits, milliseconds in 64 */
        return (format[2] == 'D' || format[2] == 'm') && set_fixed(f, FORM_INTEGER, format[2] == 'D' ? 4 : 8, true);
    case 't': /* time: seconds and milliseconds in 32 bits, the finer ones in 64 */
        return format[2] != 0 && strchr("smun", format[2]) != NULL &&
               set_fixed(f, FORM_INTEGER, format[2] == 's' || format[2] == 'm' ? 4 : 8, true);
    case 's': /* timestamp with its unit and zone; duration */
    case 'D':
        return format[2] != 0 && strchr("smun", format[2]) != NULL && set_fixed(f, FORM_INTEGER, 8, true);
    default:
        return false;
    }
}

static bool parse_nested(field *f, const char *format, bool ordered) {
    char rest;
    if (strcmp(format, "+s") == 0) {
        f->form = FORM_STRUCT;
        return true;
    }
    /* Entries of a map have no order of their own that a key could sort by. */
    if (strcmp(format, "+l") == 0 || strcmp(format, "+L") == 0 || (!ordered && strcmp(format, "+m") == 0)) {
        f->form = FORM_LIST;
        f->large = format[1] == 'L';
        f->bytes_min = 1;
        return f->child_count == 1;
    }
    long long count;
    if (sscanf(format, "+w:%lld%c", &count, &rest) == 1 && count >= 0 && count <= INT32_MAX) {
        f->form = FORM_FIXED_LIST;
        f->item_count = count;
        return f->child_count == 1;
    }
    return false;
}

static bool parse_format(field *f, const struct ArrowSchema *schema, bool ordered) {
    const char *format = schema->format;
    char rest;
    long long width;
    if (schema->dictionary != NULL) {
        return false;
    }
    if (format[0] == '+') {
        return parse_nested(f, format, ordered);
    }
    if (format[0] != 0 && format[1] == 0) {
        return parse_letter(f, format[0]);
    }
    if (sscanf(format, "w:%lld%c", &width, &rest) == 1 && width >= 0 && width <= INT32_MAX) {
        return set_fixed(f, FORM_RAW, (size_t)width, false);
    }
    return format[0] == 'd' ? parse_decimal(f, format) : format[0] == 't' && parse_temporal(f, format);
}

/* Plain: gives each column of a struct its null bit and its place. */
static void lay_out_struct(field *f) {
    size_t fixed_bytes = 0, rest_bytes_min = 0;
    for (uint32_t i = 0; i < f->child_count; i++) {
        field *child = &f->children[i];
        if (child->nullable) {
            child->null_bit = f->bit_count++;
        }
        if (is_fixed(child)) {
            child->fixed_offset = fixed_bytes;
            fixed_bytes += child->width;
        } else if (!child->nullable) {
            rest_bytes_min += child->bytes_min;
        }
    }
    for (uint32_t i = 0; i < f->child_count; i++) {
        f->children[i].fixed_offset += bitmap_bytes(f->bit_count);
    }
    f->head_bytes = bitmap_bytes(f->bit_count) + fixed_bytes;
    f->bytes_min = f->head_bytes + rest_bytes_min;
}

static int lay_out(field *f) {
    f->value_count = 1;
    if (f->form == FORM_STRUCT) {
        lay_out_struct(f);
        for (uint32_t i = 0; i < f->child_count; i++) {
            f->value_count += f->children[i].value_count;
        }
    } else if (f->form == FORM_FIXED_LIST) {
        uint64_t count = (uint64_t)f->item_count;
        f->bytes_min = (items_have_bits(f->children) ? bitmap_bytes(count) : 0) + count * item_bytes_min(f->children);
        f->value_count += f->item_count * f->children[0].value_count;
    }
    if (f->value_count > VALUE_COUNT_MAX) {
        return quire_fail(QUIRE_E_INVALID,
                          "column '%s' (format '%s') has fixed-size lists of more than %d values in all", f->path,
                          f->format, VALUE_COUNT_MAX);
    }
    return QUIRE_OK;
}

static int count_schema(const struct ArrowSchema *schema, int depth, size_t path_bytes, uint32_t *fields,
                        size_t *text) {
    if (schema == NULL || schema->release == NULL || schema->format == NULL || schema->n_children < 0 ||
        (schema->n_children > 0 && schema->children == NULL)) {
        return quire_fail(QUIRE_E_INVALID, "the Arrow schema is incomplete or was released already");
    }
    path_bytes += (schema->name == NULL ? 0 : strlen(schema->name)) + 1;
    if (depth > DEPTH_MAX || path_bytes > PATH_BYTES_MAX || schema->n_children > 65535 || *fields > 65535) {
        return quire_fail(
            QUIRE_E_INVALID,
            "the schema is nested deeper than %d, has more than 65535 columns or a name longer than %d bytes",
            DEPTH_MAX, PATH_BYTES_MAX);
    }
    (*fields)++;
    *text += path_bytes + 1 + strlen(schema->format) + 1;
    for (int64_t i = 0; i < schema->n_children; i++) {
        QUIRE_TRY(count_schema(schema->children[i], depth + 1, path_bytes, fields, text));
    }
    return QUIRE_OK;
}

static const char *keep_text(schema_builder *b, const char *parent, const char *text) {
    char *kept = b->codec->text + b->text_count;
    if (parent[0] != 0) {
        b->text_count += (size_t)sprintf(kept, "%s.%s", parent, text) + 1;
    } else {
        b->text_count += (size_t)sprintf(kept, "%s", text) + 1;
    }
    return kept;
}

/* Fills f, already placed beside its siblings; its children are placed together at the end of the fields so far. */
static int build_field(schema_builder *b, field *f, const struct ArrowSchema *schema, const char *parent) {
    quire_codec *codec = b->codec;
    f->path = keep_text(b, parent, schema->name == NULL ? "" : schema->name);
    f->format = keep_text(b, "", schema->format);
    f->nullable = (schema->flags & ARROW_FLAG_NULLABLE) != 0;
    f->index = (uint32_t)(f - codec->fields);
    f->child_count = (uint32_t)schema->n_children;
    if (!parse_format(f, schema, codec->ordered)) {
        return unsupported(f, schema, codec->ordered);
    }
    if (f->form < FORM_LIST && f->child_count != 0) {
        return quire_fail(QUIRE_E_INVALID, "column '%s' (format '%s') has children, which its type does not allow",
                          f->path, f->format);
    }
    f->children = codec->fields + codec->field_count;
    codec->field_count += f->child_count;
    for (uint32_t i = 0; i < f->child_count; i++) {
        QUIRE_TRY(build_field(b, &f->children[i], schema->children[i], f->path));
    }
    return lay_out(f);
}

static int build_codec(schema_builder *b, const struct ArrowSchema *schema) {
    field *row = b->codec->fields;
    b->codec->field_count = 1;
    QUIRE_TRY(build_field(b, row, schema, ""));
    row->nullable = false; /* a null row is a null in the column of rows, not a byte in it */
    if (row->form != FORM_STRUCT || row->child_count == 0) {
        return quire_fail(QUIRE_E_INVALID,
                          "a codec is made from a struct type with at least one column, not from format '%s'",
                          row->format);
    }
    return QUIRE_OK;
}

int quire_codec_create(const struct ArrowSchema *schema, bool ordered, quire_codec **codec) {
    uint32_t field_count = 0;
    size_t text_bytes = 0;
    QUIRE_TRY(count_schema(schema, 0, 0, &field_count, &text_bytes));
    quire_codec *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a codec");
    }
    made->ordered = ordered;
    made->fields = calloc(field_count, sizeof *made->fields);
    made->text = malloc(text_bytes);
    schema_builder builder = {.codec = made};
    int rc = made->fields == NULL || made->text == NULL
                 ? quire_fail(QUIRE_E_NOMEM, "no memory for a codec of %u columns", field_count)
                 : build_codec(&builder, schema);
    if (rc != QUIRE_OK) {
        quire_codec_destroy(made);
        return rc;
    }
    *codec = made;
    return QUIRE_OK;
}

void quire_codec_destroy(quire_codec *codec) {
    if (codec != NULL) {
        free(codec->fields);
        free(codec->text);
        free(codec);
    }
}

/* ------------------------------------------------------------------------------------------------ encode: input */

/* The buffers of one Arrow array; offset is its own, to be added to every index that its parent gives. */
typedef struct {
    const uint8_t *validity; /* NULL: no nulls */
    const uint8_t *data;
    const int32_t *offsets32;
    const int64_t *offsets64;
    int64_t offset;
    int64_t length;
} source;

typedef struct {
    const quire_codec *codec;
    source *sources;    /* one per field */
    int64_t row;        /* the row that index 0 of the current call stands for */
    const field *fault; /* the first one found while measuring */
    int64_t fault_row;
    const char *fault_text;
} encoder;

static void fault(encoder *e, int64_t row, const field *f, const char *text) {
    if (e->fault == NULL) {
        e->fault = f;
        e->fault_row = row;
        e->fault_text = text;
    }
}

static int bind_fail(const field *f, const char *what) {
    return quire_fail(QUIRE_E_INVALID, "the array for column '%s' (format '%s') %s", f->path, f->format, what);
}

static int64_t range_at(const source *s, const field *f, int64_t i, int64_t *end) {
    *end = f->large ? s->offsets64[i + 1] : s->offsets32[i + 1];
    return f->large ? s->offsets64[i] : s->offsets32[i];
}

static int bind_buffers(const field *f, const struct ArrowArray *array, source *s) {
    static const int64_t buffer_counts[] = {0, 2, 2, 2, 2, 2, 3, 2, 1, 1};
    if (array->n_buffers != buffer_counts[f->form] || array->n_children != f->child_count ||
        array->dictionary != NULL) {
        return bind_fail(f, "has another type: its buffers and children do not match");
    }
    if (array->n_buffers > 0) {
        s->validity = array->null_count == 0 ? NULL : array->buffers[0];
    }
    if (f->form == FORM_BYTES || f->form == FORM_LIST) {
        s->offsets32 = array->buffers[1];
        s->offsets64 = array->buffers[1];
    }
    if (is_fixed(f) || f->form == FORM_BYTES) {
        s->data = array->buffers[f->form == FORM_BYTES ? 2 : 1];
    }
    if (array->length > 0 && s->data == NULL && is_fixed(f) && f->width > 0) {
        return bind_fail(f, "has no data buffer");
    }
    if (array->length > 0 && s->offsets32 == NULL && (f->form == FORM_BYTES || f->form == FORM_LIST)) {
        return bind_fail(f, "has no offsets buffer");
    }
    return QUIRE_OK;
}

/* count: how many values the parent will read. */
static int bind(encoder *e, const field *f, const struct ArrowArray *array, int64_t count) {
    if (array == NULL || array->release == NULL || array->length < 0 || array->offset < 0) {
        return bind_fail(f, "is incomplete or was released already");
    }
    source *s = &e->sources[f->index];
    s->offset = array->offset;
    s->length = array->length;
    if (array->length < count) {
        return bind_fail(f, "is shorter than its parent needs");
    }
    QUIRE_TRY(bind_buffers(f, array, s));
    int64_t child_count = array->offset + array->length;
    if (f->form == FORM_LIST) {
        int64_t first = 0, last = 0;
        if (array->length > 0) {
            first = range_at(s, f, array->offset, &last);
            range_at(s, f, child_count - 1, &last);
        }
        if (first < 0 || last < first) {
            return bind_fail(f, "has offsets that run backwards");
        }
        child_count = last;
    } else if (f->form == FORM_FIXED_LIST) {
        child_count *= f->item_count;
    }
    for (uint32_t i = 0; i < f->child_count; i++) {
        QUIRE_TRY(bind(e, &f->children[i], array->children[i], child_count));
    }
    return QUIRE_OK;
}

INLINE bool is_null(const source *s, int64_t i) {
    return s->validity != NULL && !bit_get(s->validity, i);
}

/* True if value i (before the array's own offset) is null; a fault if it may not be. row: for the message. */
static bool absent(encoder *e, const field *f, int64_t i, int64_t row) {
    const source *s = &e->sources[f->index];
    if (f->form == FORM_NULL) {
        return true;
    }
    if (!is_null(s, s->offset + i)) {
        return false;
    }
    if (!f->nullable) {
        fault(e, row, f, "is null, but the column is declared without nulls");
    }
    return true;
}

/* Bytes of a string; checks what can be checked of them when measuring. i: offset added. */
static const uint8_t *bytes_at(const source *s, const field *f, int64_t i, size_t *count) {
    int64_t end, start = range_at(s, f, i, &end);
    *count = (size_t)(end - start);
    return s->data + start;
}
static const uint8_t *bytes_checked(encoder *e, const field *f, int64_t i, int64_t row, size_t *count) {
    const source *s = &e->sources[f->index];
    int64_t end, start = range_at(s, f, i, &end);
    *count = 0;
    if (start < 0 || end < start || (end > start && s->data == NULL)) {
        fault(e, row, f, "has offsets that run backwards");
        return NULL;
    }
    const uint8_t *bytes = bytes_at(s, f, i, count);
    if (f->utf8 && !utf8_valid(bytes, *count)) {
        fault(e, row, f, "is not valid UTF-8; declare the column as binary to keep any bytes");
    }
    return bytes;
}
static int64_t items_at(const source *s, const field *f, int64_t i, int64_t *count) {
    if (f->form == FORM_FIXED_LIST) {
        *count = f->item_count;
        return i * f->item_count;
    }
    int64_t end, start = range_at(s, f, i, &end);
    *count = end - start;
    return start;
}
static int64_t items_checked(encoder *e, const field *f, int64_t i, int64_t row, int64_t *count) {
    int64_t start = items_at(&e->sources[f->index], f, i, count);
    const source *items = &e->sources[f->children[0].index];
    if (start < 0 || *count < 0 || start + *count > items->length) {
        fault(e, row, f, "has offsets outside of its items");
        *count = 0;
    }
    return start;
}

/* ------------------------------------------------------------------------------------------------ encode: ordered */

/* Each works on count values from first on (before the array's own offset) and one entry of bytes or at per value. */
static void measure_keys(encoder *e, const field *f, int64_t first, int64_t count, size_t *bytes) {
    const source *s = &e->sources[f->index];
    int64_t row = e->row;
    if (is_fixed(f) && s->validity == NULL) {
        for (int64_t r = 0; r < count; r++) {
            bytes[r] += f->width + f->nullable;
        }
        return;
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t i = s->offset + first + r, item_count, item;
        bytes[r] += f->nullable;
        if (absent(e, f, first + r, row + r)) {
            continue;
        }
        e->row = row + r;
        switch (f->form) {
        case FORM_BYTES: {
            size_t length;
            const uint8_t *text = bytes_checked(e, f, i, row + r, &length);
            bytes[r] += length + count_low(text, length) + 1;
            break;
        }
        case FORM_LIST:
        case FORM_FIXED_LIST:
            item = items_checked(e, f, i, row + r, &item_count);
            bytes[r] += f->form == FORM_LIST ? (size_t)item_count + 1 : 0;
            for (int64_t j = 0; j < item_count; j++) {
                measure_keys(e, f->children, item + j, 1, &bytes[r]);
            }
            break;
        case FORM_STRUCT:
            for (uint32_t c = 0; c < f->child_count; c++) {
                measure_keys(e, &f->children[c], i, 1, &bytes[r]);
            }
            break;
        default:
            bytes[r] += f->width;
        }
    }
    e->row = row;
}

INLINE void write_numbers(const source *s, const field *f, int64_t first, int64_t count, uint8_t **at, unsigned width,
                          bool is_float) {
    const uint8_t *data = s->data + (s->offset + first) * width;
    uint64_t turn = (uint64_t)f->sign << (8 * width - 8);
    for (int64_t r = 0; r < count; r++, data += width) {
        uint8_t *p = at[r];
        if (f->nullable) {
            bool null = is_null(s, s->offset + first + r);
            *p++ = !null;
            if (null) {
                at[r] = p;
                continue;
            }
        }
        uint64_t x = load(data, width);
        store(p, swap(is_float ? float_to_ordered(x, width) : x ^ turn, width), width);
        at[r] = p + width;
    }
}

static void write_escaped(uint8_t **at, const uint8_t *bytes, size_t count) {
    uint8_t *p = *at;
    if (QUIRE_LIKELY(count_low(bytes, count) == 0)) {
        if (count > 0) {
            memcpy(p, bytes, count);
        }
        p += count;
    } else {
        for (size_t i = 0; i < count; i++) {
            if (bytes[i] < 2) {
                *p++ = 1;
                *p++ = (uint8_t)(bytes[i] + 1);
            } else {
                *p++ = bytes[i];
            }
        }
    }
    *p++ = 0;
    *at = p;
}

static void write_keys(const encoder *e, const field *f, int64_t first, int64_t count, uint8_t **at);

/* One value that is not null, of any form but the numbers. i: offset added. */
static void write_key(const encoder *e, const field *f, int64_t i, uint8_t **at) {
    const source *s = &e->sources[f->index];
    int64_t item, item_count;
    size_t length;
    switch (f->form) {
    case FORM_BOOL:
        *(*at)++ = bit_get(s->data, i);
        break;
    case FORM_DECIMAL:
        reverse_bytes(*at, s->data + i * (int64_t)f->width, f->width);
        **at ^= f->sign;
        *at += f->width;
        break;
    case FORM_RAW:
        if (f->width > 0) {
            memcpy(*at, s->data + i * (int64_t)f->width, f->width);
        }
        *at += f->width;
        break;
    case FORM_BYTES: {
        const uint8_t *bytes = bytes_at(s, f, i, &length);
        write_escaped(at, bytes, length);
        break;
    }
    case FORM_LIST:
    case FORM_FIXED_LIST:
        item = items_at(s, f, i, &item_count);
        for (int64_t j = 0; j < item_count; j++) {
            if (f->form == FORM_LIST) {
                *(*at)++ = 1;
            }
            write_keys(e, f->children, item + j, 1, at);
        }
        if (f->form == FORM_LIST) {
            *(*at)++ = 0;
        }
        break;
    default:
        for (uint32_t c = 0; c < f->child_count; c++) {
            write_keys(e, &f->children[c], i, 1, at);
        }
    }
}

static void write_keys(const encoder *e, const field *f, int64_t first, int64_t count, uint8_t **at) {
    const source *s = &e->sources[f->index];
    if (f->form == FORM_INTEGER) {
        switch (f->width) {
        case 1:
            write_numbers(s, f, first, count, at, 1, false);
            return;
        case 2:
            write_numbers(s, f, first, count, at, 2, false);
            return;
        case 4:
            write_numbers(s, f, first, count, at, 4, false);
            return;
        default:
            write_numbers(s, f, first, count, at, 8, false);
            return;
        }
    }
    if (f->form == FORM_FLOAT) {
        switch (f->width) {
        case 2:
            write_numbers(s, f, first, count, at, 2, true);
            return;
        case 4:
            write_numbers(s, f, first, count, at, 4, true);
            return;
        default:
            write_numbers(s, f, first, count, at, 8, true);
            return;
        }
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t i = s->offset + first + r;
        bool null = f->form == FORM_NULL || is_null(s, i);
        if (f->nullable) {
            *at[r]++ = !null;
        }
        if (!null) {
            write_key(e, f, i, &at[r]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ encode: plain */

static size_t measure_value(encoder *e, const field *f, int64_t i);

/* A non-nullable column of fixed width takes its bytes whatever it holds, but a null in it is a fault. */
static void check_fixed(encoder *e, const field *f, int64_t first, int64_t count, bool one_row) {
    if (!f->nullable && e->sources[f->index].validity != NULL) {
        for (int64_t r = 0; r < count; r++) {
            absent(e, f, first + r, e->row + (one_row ? 0 : r));
        }
    }
}

static size_t measure_items(encoder *e, const field *f, int64_t first, int64_t count) {
    size_t bytes = items_have_bits(f) ? bitmap_bytes((uint64_t)count) : 0;
    if (is_fixed(f)) {
        check_fixed(e, f, first, count, true);
        return bytes + (size_t)count * f->width;
    }
    for (int64_t j = 0; j < count; j++) {
        if (!absent(e, f, first + j, e->row)) {
            bytes += measure_value(e, f, e->sources[f->index].offset + first + j);
        }
    }
    return bytes;
}

/* first: the struct's own offset added. */
static void measure_rows(encoder *e, const field *f, int64_t first, int64_t count, size_t *bytes) {
    int64_t row = e->row;
    for (int64_t r = 0; r < count; r++) {
        bytes[r] += f->head_bytes;
    }
    for (uint32_t c = 0; c < f->child_count; c++) {
        const field *child = &f->children[c];
        int64_t offset = e->sources[child->index].offset;
        if (is_fixed(child)) {
            check_fixed(e, child, first, count, false);
            continue;
        }
        for (int64_t r = 0; r < count; r++) {
            e->row = row + r;
            if (!absent(e, child, first + r, e->row)) {
                bytes[r] += measure_value(e, child, offset + first + r);
            }
        }
        e->row = row;
    }
}

/* A value that is not null and not of fixed width. i: offset added. */
static size_t measure_value(encoder *e, const field *f, int64_t i) {
    size_t length = 0;
    int64_t item, item_count;
    switch (f->form) {
    case FORM_BYTES:
        bytes_checked(e, f, i, e->row, &length);
        return varint_bytes(length) + length;
    case FORM_STRUCT:
        measure_rows(e, f, i, 1, &length);
        return length;
    default:
        item = items_checked(e, f, i, e->row, &item_count);
        return (f->form == FORM_LIST ? varint_bytes((uint64_t)item_count) : 0) +
               measure_items(e, f->children, item, item_count);
    }
}

static void write_value(const encoder *e, const field *f, int64_t i, uint8_t **at);

static void write_fixed(const source *s, const field *f, int64_t i, uint8_t *p) {
    if (f->form == FORM_BOOL) {
        *p = bit_get(s->data, i);
    } else if (f->width > 0) {
        memcpy(p, s->data + i * (int64_t)f->width, f->width);
    }
}

static void write_items(const encoder *e, const field *f, int64_t first, int64_t count, uint8_t **at) {
    const source *s = &e->sources[f->index];
    uint8_t *bits = *at;
    first += s->offset;
    if (items_have_bits(f)) {
        memset(bits, 0, bitmap_bytes((uint64_t)count));
        *at += bitmap_bytes((uint64_t)count);
    }
    if (is_fixed(f) && f->form != FORM_BOOL && s->validity == NULL) {
        if ((size_t)count * f->width > 0) {
            memcpy(*at, s->data + first * (int64_t)f->width, (size_t)count * f->width);
        }
        *at += (size_t)count * f->width;
        return;
    }
    for (int64_t j = 0; j < count; j++) {
        bool null = f->form == FORM_NULL || is_null(s, first + j);
        if (null) {
            bit_set(bits, j);
        }
        if (is_fixed(f)) {
            if (null) {
                memset(*at, 0, f->width);
            } else {
                write_fixed(s, f, first + j, *at);
            }
            *at += f->width;
        } else if (!null) {
            write_value(e, f, first + j, at);
        }
    }
}

INLINE void write_slots(const source *s, const field *f, int64_t first, int64_t count, uint8_t *const *row,
                        size_t width) {
    const uint8_t *data = s->data + (s->offset + first) * (int64_t)width;
    for (int64_t r = 0; r < count; r++, data += width) {
        if (is_null(s, s->offset + first + r)) {
            bit_set(row[r], f->null_bit);
            memset(row[r] + f->fixed_offset, 0, width);
        } else {
            memcpy(row[r] + f->fixed_offset, data, width);
        }
    }
}

static void write_fixed_column(const source *s, const field *f, int64_t first, int64_t count, uint8_t *const *row) {
    switch (f->form == FORM_BOOL ? 0 : f->width) {
    case 1:
        write_slots(s, f, first, count, row, 1);
        return;
    case 2:
        write_slots(s, f, first, count, row, 2);
        return;
    case 4:
        write_slots(s, f, first, count, row, 4);
        return;
    case 8:
        write_slots(s, f, first, count, row, 8);
        return;
    case 16:
        write_slots(s, f, first, count, row, 16);
        return;
    default:
        for (int64_t r = 0; r < count; r++) {
            if (is_null(s, s->offset + first + r)) {
                bit_set(row[r], f->null_bit);
                memset(row[r] + f->fixed_offset, 0, f->width);
            } else {
                write_fixed(s, f, s->offset + first + r, row[r] + f->fixed_offset);
            }
        }
    }
}

/* first: the struct's own offset added. count is at most BLOCK_ROWS. */
static void write_rows(const encoder *e, const field *f, int64_t first, int64_t count, uint8_t **at, uint8_t **row) {
    for (int64_t r = 0; r < count; r++) {
        row[r] = at[r];
        memset(row[r], 0, bitmap_bytes(f->bit_count));
        at[r] += f->head_bytes;
    }
    for (uint32_t c = 0; c < f->child_count; c++) {
        const field *child = &f->children[c];
        const source *s = &e->sources[child->index];
        if (is_fixed(child)) {
            write_fixed_column(s, child, first, count, row);
            continue;
        }
        for (int64_t r = 0; r < count; r++) {
            if (child->form == FORM_NULL || is_null(s, s->offset + first + r)) {
                bit_set(row[r], child->null_bit);
            } else {
                write_value(e, child, s->offset + first + r, &at[r]);
            }
        }
    }
}

static void write_value(const encoder *e, const field *f, int64_t i, uint8_t **at) {
    const source *s = &e->sources[f->index];
    uint8_t *row;
    size_t length;
    int64_t item, item_count;
    switch (f->form) {
    case FORM_BYTES: {
        const uint8_t *bytes = bytes_at(s, f, i, &length);
        *at = varint_write(*at, length);
        if (length > 0) {
            memcpy(*at, bytes, length);
        }
        *at += length;
        break;
    }
    case FORM_STRUCT:
        write_rows(e, f, i, 1, at, &row);
        break;
    default:
        item = items_at(s, f, i, &item_count);
        if (f->form == FORM_LIST) {
            *at = varint_write(*at, (uint64_t)item_count);
        }
        write_items(e, f->children, item, item_count, at);
    }
}

/* ------------------------------------------------------------------------------------------------ encode: rows */

static int column_nomem(void) {
    return quire_fail(QUIRE_E_NOMEM, "no memory for the encoded rows");
}

static int column_widen(quire_column *column) {
    int64_t *wide = malloc(((size_t)column->row_capacity + 1) * sizeof *wide);
    if (wide == NULL) {
        return column_nomem();
    }
    for (int64_t i = 0; i <= column->row_count; i++) {
        wide[i] = column->offsets32[i];
    }
    free(column->offsets32);
    column->offsets32 = NULL;
    column->offsets64 = wide;
    return QUIRE_OK;
}

static int column_reserve_rows(quire_column *column, int64_t row_count) {
    bool fresh = column->offsets32 == NULL && column->offsets64 == NULL;
    int64_t capacity = column->row_count + row_count;
    if (!fresh && capacity <= column->row_capacity) {
        return QUIRE_OK;
    }
    if (capacity < column->row_capacity * 2) {
        capacity = column->row_capacity * 2;
    }
    bool wide = column->offsets64 != NULL;
    void *offsets = realloc(wide ? (void *)column->offsets64 : (void *)column->offsets32,
                            ((size_t)capacity + 1) * (wide ? sizeof(int64_t) : sizeof(int32_t)));
    if (offsets == NULL) {
        return column_nomem();
    }
    if (wide) {
        column->offsets64 = offsets;
    } else {
        column->offsets32 = offsets;
    }
    if (fresh) {
        column->offsets32[0] = 0;
    }
    if (column->validity != NULL) {
        size_t before = bitmap_bytes((uint64_t)column->row_capacity), after = bitmap_bytes((uint64_t)capacity);
        uint8_t *validity = realloc(column->validity, after);
        if (validity == NULL) {
            return column_nomem();
        }
        memset(validity + before, 0, after - before);
        column->validity = validity;
    }
    column->row_capacity = capacity;
    return QUIRE_OK;
}

static int column_reserve_bytes(quire_column *column, size_t byte_count) {
    size_t needed = column->bytes_count + byte_count;
    if (column->offsets64 == NULL && needed > INT32_MAX) {
        QUIRE_TRY(column_widen(column));
    }
    if (needed > column->bytes_capacity || column->bytes == NULL) {
        size_t capacity = column->bytes_capacity + column->bytes_capacity / 2;
        capacity = capacity < needed ? needed : capacity;
        capacity = capacity < 64 ? 64 : capacity;
        uint8_t *bytes = realloc(column->bytes, capacity);
        if (bytes == NULL) {
            return column_nomem();
        }
        column->bytes = bytes;
        column->bytes_capacity = capacity;
    }
    return QUIRE_OK;
}

/* Takes one row of byte_count bytes into the column, to be written at the place returned. Room is there. */
static uint8_t *column_take(quire_column *column, size_t byte_count) {
    uint8_t *place = column->bytes + column->bytes_count;
    column->bytes_count += byte_count;
    if (column->validity != NULL) {
        bit_set(column->validity, column->row_count);
    }
    column->row_count++;
    if (column->offsets64 != NULL) {
        column->offsets64[column->row_count] = (int64_t)column->bytes_count;
    } else {
        column->offsets32[column->row_count] = (int32_t)column->bytes_count;
    }
    return place;
}

/* Back to what the column held before; bits behind the last row are zero, as quire_column_add_null counts on. */
static void column_cut(quire_column *column, int64_t row_count, int64_t null_count, size_t bytes_count) {
    for (int64_t row = row_count; row < column->row_count && column->validity != NULL; row++) {
        bit_clear(column->validity, row);
    }
    column->row_count = row_count;
    column->null_count = null_count;
    column->bytes_count = bytes_count;
}

static int encode_fault(const encoder *e) {
    return quire_fail(QUIRE_E_INVALID, "row %lld, column '%s' (format '%s') %s", (long long)e->fault_row,
                      e->fault->path, e->fault->format, e->fault_text);
}

/* count rows from row first of the batch on, none of them null, count at most BLOCK_ROWS. */
static int encode_block(encoder *e, int64_t first, int64_t count, quire_column *rows) {
    const field *root = e->codec->fields;
    size_t bytes[BLOCK_ROWS], total = 0;
    uint8_t *at[BLOCK_ROWS], *row[BLOCK_ROWS];
    int64_t base = e->sources[0].offset + first;
    memset(bytes, 0, (size_t)count * sizeof bytes[0]);
    e->row = first;
    if (e->codec->ordered) {
        for (uint32_t c = 0; c < root->child_count; c++) {
            measure_keys(e, &root->children[c], base, count, bytes);
        }
    } else {
        measure_rows(e, root, base, count, bytes);
    }
    if (e->fault != NULL) {
        return encode_fault(e);
    }
    for (int64_t r = 0; r < count; r++) {
        total += bytes[r];
    }
    QUIRE_TRY(column_reserve_bytes(rows, total));
    for (int64_t r = 0; r < count; r++) {
        at[r] = column_take(rows, bytes[r]);
    }
    if (e->codec->ordered) {
        for (uint32_t c = 0; c < root->child_count; c++) {
            write_keys(e, &root->children[c], base, count, at);
        }
    } else {
        write_rows(e, root, base, count, at, row);
    }
    return QUIRE_OK;
}

static int encode_rows(encoder *e, int64_t row_count, quire_column *rows) {
    const source *root = &e->sources[0];
    QUIRE_TRY(column_reserve_rows(rows, row_count));
    for (int64_t first = 0; first < row_count;) {
        if (is_null(root, root->offset + first)) {
            QUIRE_TRY(quire_column_add_null(rows));
            first++;
            continue;
        }
        int64_t count = 1;
        while (count < BLOCK_ROWS && first + count < row_count && !is_null(root, root->offset + first + count)) {
            count++;
        }
        QUIRE_TRY(encode_block(e, first, count, rows));
        first += count;
    }
    return QUIRE_OK;
}

int quire_codec_encode(const quire_codec *codec, const struct ArrowArray *batch, quire_column *rows) {
    encoder e = {.codec = codec, .sources = calloc(codec->field_count, sizeof(source))};
    if (e.sources == NULL) {
        return column_nomem();
    }
    quire_column before = *rows;
    int rc = bind(&e, codec->fields, batch, 0);
    if (rc == QUIRE_OK) {
        rc = encode_rows(&e, batch->length, rows);
    }
    if (rc != QUIRE_OK) {
        column_cut(rows, before.row_count, before.null_count, before.bytes_count);
    }
    free(e.sources);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ decode: builders */

/* One Arrow array being made. Bits of validity not cleared are set. */
typedef struct {
    uint8_t *validity;
    uint8_t *data;
    int32_t *offsets32;
    int64_t *offsets64;
    int64_t length, capacity, null_count;
    size_t bytes_count, bytes_capacity;
} builder;

typedef struct {
    const quire_codec *codec;
    builder *builders; /* one per field */
    int64_t row;       /* the row that index 0 of the current call stands for */
} decoder;

static int corrupt(int64_t row, const field *f, const char *what) {
    return quire_fail(
        QUIRE_E_CORRUPT,
        "row %lld of the encoded rows, column '%s' (format '%s'): %s; the bytes were not written with this schema",
        (long long)row, f->path, f->format, what);
}

/* Moves buffer to one of at least new_bytes; keeps old_bytes. */
static int grow(void **buffer, size_t old_bytes, size_t new_bytes) {
    void *bigger;
    new_bytes = (new_bytes + BUFFER_ALIGNMENT - 1) & ~(size_t)(BUFFER_ALIGNMENT - 1);
    if (posix_memalign(&bigger, BUFFER_ALIGNMENT, new_bytes == 0 ? BUFFER_ALIGNMENT : new_bytes) != 0) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for %zu bytes of a decoded column", new_bytes);
    }
    if (*buffer != NULL) {
        memcpy(bigger, *buffer, old_bytes);
        free(*buffer);
    }
    *buffer = bigger;
    return QUIRE_OK;
}

static int grow_offsets(builder *b, bool large, int64_t capacity) {
    size_t old_count = (size_t)b->capacity + 1, new_count = (size_t)capacity + 1;
    if (large) {
        bool fresh = b->offsets64 == NULL;
        QUIRE_TRY(grow((void **)&b->offsets64, old_count * 8, new_count * 8));
        b->offsets64[0] = fresh ? 0 : b->offsets64[0];
    } else {
        bool fresh = b->offsets32 == NULL;
        QUIRE_TRY(grow((void **)&b->offsets32, old_count * 4, new_count * 4));
        b->offsets32[0] = fresh ? 0 : b->offsets32[0];
    }
    return QUIRE_OK;
}

static int grow_values(const field *f, builder *b, int64_t capacity) {
    size_t old_count = (size_t)b->capacity, new_count = (size_t)capacity;
    size_t old_bits = bitmap_bytes(old_count), new_bits = bitmap_bytes(new_count);
    QUIRE_TRY(grow((void **)&b->validity, old_bits, new_bits));
    memset(b->validity + old_bits, 0xFF, new_bits - old_bits);
    if (f->form == FORM_BOOL) {
        QUIRE_TRY(grow((void **)&b->data, old_bits, new_bits));
        memset(b->data + old_bits, 0, new_bits - old_bits);
    } else if (is_fixed(f)) {
        QUIRE_TRY(grow((void **)&b->data, old_count * f->width, new_count * f->width));
    } else if (f->form == FORM_BYTES || f->form == FORM_LIST) {
        QUIRE_TRY(grow_offsets(b, f->large, capacity));
    }
    b->capacity = capacity;
    return QUIRE_OK;
}

/* Room for count more values. Capacities are multiples of 8, so that bitmaps grow by whole bytes. */
static int reserve(decoder *d, const field *f, int64_t count) {
    builder *b = &d->builders[f->index];
    int64_t capacity = b->length + count;
    if (QUIRE_LIKELY(capacity <= b->capacity)) {
        return QUIRE_OK;
    }
    if (capacity < b->capacity * 2) {
        capacity = b->capacity * 2;
    }
    return grow_values(f, b, (capacity + 63) & ~(int64_t)63);
}

static int reserve_bytes(builder *b, size_t count) {
    size_t needed = b->bytes_count + count;
    if (QUIRE_LIKELY(needed <= b->bytes_capacity && b->data != NULL)) {
        return QUIRE_OK;
    }
    size_t capacity = needed < b->bytes_capacity * 2 ? b->bytes_capacity * 2 : needed;
    QUIRE_TRY(grow((void **)&b->data, b->bytes_count, capacity));
    b->bytes_capacity = capacity;
    return QUIRE_OK;
}

/* Ends a string or list at end (bytes of text, or items so far). Room is there. */
static int end_at(const decoder *d, const field *f, builder *b, int64_t end) {
    b->length++;
    if (f->large) {
        b->offsets64[b->length] = end;
        return QUIRE_OK;
    }
    if (end > INT32_MAX) {
        return quire_fail(
            QUIRE_E_FULL,
            "row %lld takes column '%s' past the 2 GiB that 32-bit offsets reach; decode fewer rows at a time, "
            "or declare the column as its large_ type",
            (long long)d->row, f->path);
    }
    b->offsets32[b->length] = (int32_t)end;
    return QUIRE_OK;
}

static int append_null(decoder *d, const field *f) {
    builder *b = &d->builders[f->index];
    QUIRE_TRY(reserve(d, f, 1));
    bit_clear(b->validity, b->length);
    b->null_count++;
    switch (f->form) {
    case FORM_BYTES:
        return end_at(d, f, b, (int64_t)b->bytes_count);
    case FORM_LIST:
        return end_at(d, f, b, d->builders[f->children[0].index].length);
    case FORM_FIXED_LIST:
    case FORM_STRUCT:
        for (uint32_t c = 0; c < f->child_count; c++) {
            for (int64_t j = f->form == FORM_STRUCT ? 1 : f->item_count; j > 0; j--) {
                QUIRE_TRY(append_null(d, &f->children[c]));
            }
        }
        break;
    case FORM_NULL:
    case FORM_BOOL:
        break;
    default:
        memset(b->data + (size_t)b->length * f->width, 0, f->width);
    }
    b->length++;
    return QUIRE_OK;
}

static int append_bytes(decoder *d, const field *f, const uint8_t *bytes, size_t count) {
    builder *b = &d->builders[f->index];
    if (f->utf8 && !utf8_valid(bytes, count)) {
        return corrupt(d->row, f, "the text is not valid UTF-8");
    }
    QUIRE_TRY(reserve(d, f, 1));
    QUIRE_TRY(reserve_bytes(b, count));
    if (count > 0) {
        memcpy(b->data + b->bytes_count, bytes, count);
    }
    b->bytes_count += count;
    return end_at(d, f, b, (int64_t)b->bytes_count);
}

static int append_bool(decoder *d, const field *f, uint8_t byte) {
    builder *b = &d->builders[f->index];
    if (byte > 1) {
        return corrupt(d->row, f, "a bool is neither 00 nor 01");
    }
    QUIRE_TRY(reserve(d, f, 1));
    if (byte == 1) {
        bit_set(b->data, b->length);
    }
    b->length++;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ decode: ordered */

#define TEXT_CUT    "the bytes end early"
#define TEXT_MARKER "a marker is neither 00 nor 01"

/* 1: a value follows, 0: null, else an error code. */
INLINE int read_marker(int64_t row, const field *f, const uint8_t **p, const uint8_t *end) {
    if (!f->nullable) {
        return 1;
    }
    if (QUIRE_UNLIKELY(*p == end)) {
        return corrupt(row, f, TEXT_CUT);
    }
    uint8_t marker = *(*p)++;
    return QUIRE_LIKELY(marker <= 1) ? marker : corrupt(row, f, TEXT_MARKER);
}

INLINE int read_numbers(decoder *d, const field *f, int64_t count, const uint8_t **at, const uint8_t *const *end,
                        unsigned width, bool is_float) {
    builder *b = &d->builders[f->index];
    uint64_t turn = (uint64_t)f->sign << (8 * width - 8);
    QUIRE_TRY(reserve(d, f, count));
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = at[r];
        int marker = read_marker(d->row + r, f, &p, end[r]);
        if (QUIRE_UNLIKELY(marker != 1)) {
            QUIRE_TRY(marker < 0 ? marker : append_null(d, f));
            at[r] = p;
            continue;
        }
        if (QUIRE_UNLIKELY((size_t)(end[r] - p) < width)) {
            return corrupt(d->row + r, f, TEXT_CUT);
        }
        uint64_t x = swap(load(p, width), width) ^ (is_float ? 0 : turn);
        if (is_float && QUIRE_UNLIKELY(!float_from_ordered(x, width, &x))) {
            return corrupt(d->row + r, f, "a key holds -0.0 or an unusual NaN");
        }
        store(b->data + b->length++ * width, x, width);
        at[r] = p + width;
    }
    return QUIRE_OK;
}

static int read_escaped(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    const uint8_t *p = *at, *stop = end == p ? NULL : memchr(p, 0, (size_t)(end - p));
    if (stop == NULL) {
        return corrupt(d->row, f, TEXT_CUT);
    }
    *at = stop + 1;
    size_t count = (size_t)(stop - p);
    if (QUIRE_LIKELY(memchr(p, 1, count) == NULL)) {
        return append_bytes(d, f, p, count);
    }
    builder *b = &d->builders[f->index];
    QUIRE_TRY(reserve(d, f, 1));
    QUIRE_TRY(reserve_bytes(b, count));
    uint8_t *text = b->data + b->bytes_count, *to = text;
    while (p < stop) {
        if (*p != 1) {
            *to++ = *p++;
        } else if (p[1] == 1 || p[1] == 2) { /* at worst p[1] is the 00 at stop */
            *to++ = (uint8_t)(p[1] - 1);
            p += 2;
        } else {
            return corrupt(d->row, f, "an escape is neither 01 01 nor 01 02");
        }
    }
    if (f->utf8 && !utf8_valid(text, (size_t)(to - text))) {
        return corrupt(d->row, f, "the text is not valid UTF-8");
    }
    b->bytes_count += (size_t)(to - text);
    return end_at(d, f, b, (int64_t)b->bytes_count);
}

static int read_keys(decoder *d, const field *f, int64_t count, const uint8_t **at, const uint8_t *const *end);

static int read_key_list(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    QUIRE_TRY(reserve(d, f, 1));
    for (;;) {
        if (*at == end) {
            return corrupt(d->row, f, TEXT_CUT);
        }
        uint8_t marker = *(*at)++;
        if (marker == 0) {
            break;
        }
        if (marker != 1) {
            return corrupt(d->row, f, TEXT_MARKER);
        }
        QUIRE_TRY(read_keys(d, f->children, 1, at, &end));
    }
    return end_at(d, f, &d->builders[f->index], d->builders[f->children[0].index].length);
}

/* One value that is not null, of any form but the numbers; d->row is its row. */
static int read_key(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    builder *b = &d->builders[f->index];
    if (is_fixed(f) && (size_t)(end - *at) < f->width) {
        return corrupt(d->row, f, TEXT_CUT);
    }
    switch (f->form) {
    case FORM_NULL:
        return corrupt(d->row, f, "a column of type null holds a value");
    case FORM_BOOL:
        return append_bool(d, f, *(*at)++);
    case FORM_DECIMAL:
    case FORM_RAW: {
        QUIRE_TRY(reserve(d, f, 1));
        uint8_t *to = b->data + (size_t)b->length++ * f->width;
        if (f->form == FORM_RAW) {
            memcpy(to, *at, f->width);
        } else {
            reverse_bytes(to, *at, f->width);
            to[f->width - 1] ^= f->sign;
        }
        *at += f->width;
        return QUIRE_OK;
    }
    case FORM_BYTES:
        return read_escaped(d, f, at, end);
    case FORM_LIST:
        return read_key_list(d, f, at, end);
    default:
        QUIRE_TRY(reserve(d, f, 1));
        for (uint32_t c = 0; c < f->child_count; c++) {
            for (int64_t j = f->form == FORM_STRUCT ? 1 : f->item_count; j > 0; j--) {
                QUIRE_TRY(read_keys(d, &f->children[c], 1, at, &end));
            }
        }
        b->length++;
        return QUIRE_OK;
    }
}

static int read_keys(decoder *d, const field *f, int64_t count, const uint8_t **at, const uint8_t *const *end) {
    int64_t row = d->row;
    if (f->form == FORM_INTEGER) {
        switch (f->width) {
        case 1:
            return read_numbers(d, f, count, at, end, 1, false);
        case 2:
            return read_numbers(d, f, count, at, end, 2, false);
        case 4:
            return read_numbers(d, f, count, at, end, 4, false);
        default:
            return read_numbers(d, f, count, at, end, 8, false);
        }
    }
    if (f->form == FORM_FLOAT) {
        switch (f->width) {
        case 2:
            return read_numbers(d, f, count, at, end, 2, true);
        case 4:
            return read_numbers(d, f, count, at, end, 4, true);
        default:
            return read_numbers(d, f, count, at, end, 8, true);
        }
    }
    for (int64_t r = 0; r < count; r++) {
        d->row = row + r;
        int marker = read_marker(d->row, f, &at[r], end[r]);
        QUIRE_TRY(marker < 0 ? marker : marker == 0 ? append_null(d, f) : read_key(d, f, &at[r], end[r]));
    }
    d->row = row;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ decode: plain */

static int read_value(decoder *d, const field *f, const uint8_t **at, const uint8_t *end);

/* f->width bytes at p: a value, or the zeros that stand in for null. */
static int read_fixed(decoder *d, const field *f, const uint8_t *p, bool null) {
    builder *b = &d->builders[f->index];
    if (null) {
        for (size_t i = 0; i < f->width; i++) {
            if (p[i] != 0) {
                return corrupt(d->row, f, "a null is not filled with zeros");
            }
        }
        return append_null(d, f);
    }
    if (f->form == FORM_BOOL) {
        return append_bool(d, f, *p);
    }
    QUIRE_TRY(reserve(d, f, 1));
    memcpy(b->data + (size_t)b->length++ * f->width, p, f->width);
    return QUIRE_OK;
}

/* Bits behind the last one used are zero (I2). */
static bool bits_are_clean(const uint8_t *bits, uint64_t bit_count) {
    return bit_count % 8 == 0 || bits[bit_count / 8] >> (bit_count % 8) == 0;
}
static bool bits_are_zero(const uint8_t *bits, size_t count) {
    uint8_t any = 0;
    for (size_t i = 0; i < count; i++) {
        any |= bits[i];
    }
    return any == 0;
}

static int read_items_fixed(decoder *d, const field *f, uint64_t count, const uint8_t *bits, const uint8_t **at) {
    builder *b = &d->builders[f->index];
    if (f->form != FORM_BOOL && (bits == NULL || bits_are_zero(bits, bitmap_bytes(count)))) {
        QUIRE_TRY(reserve(d, f, (int64_t)count));
        if (count * f->width > 0) {
            memcpy(b->data + (size_t)b->length * f->width, *at, count * f->width);
        }
        b->length += (int64_t)count;
        *at += count * f->width;
        return QUIRE_OK;
    }
    for (uint64_t j = 0; j < count; j++, *at += f->width) {
        QUIRE_TRY(read_fixed(d, f, *at, bits != NULL && bit_get(bits, (int64_t)j)));
    }
    return QUIRE_OK;
}

static int read_items(decoder *d, const field *f, uint64_t count, const uint8_t **at, const uint8_t *end) {
    const uint8_t *bits = NULL;
    if (items_have_bits(f)) {
        bits = *at;
        if ((size_t)(end - *at) < bitmap_bytes(count)) {
            return corrupt(d->row, f, TEXT_CUT);
        }
        *at += bitmap_bytes(count);
        if (!bits_are_clean(bits, count) || (!f->nullable && !bits_are_zero(bits, bitmap_bytes(count)))) {
            return corrupt(d->row, f, "null bits are set where none may be");
        }
    }
    size_t bytes_min = item_bytes_min(f);
    if (bytes_min > 0 && count > (size_t)(end - *at) / bytes_min) {
        return corrupt(d->row, f, TEXT_CUT);
    }
    if (is_fixed(f)) {
        return read_items_fixed(d, f, count, bits, at);
    }
    for (uint64_t j = 0; j < count; j++) {
        bool null = bits != NULL && bit_get(bits, (int64_t)j);
        QUIRE_TRY(null ? append_null(d, f) : read_value(d, f, at, end));
    }
    return QUIRE_OK;
}

/* Checks the head of a struct at *at and steps over it. */
static int read_head(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    if ((size_t)(end - *at) < f->head_bytes) {
        return corrupt(d->row, f, TEXT_CUT);
    }
    if (!bits_are_clean(*at, f->bit_count)) {
        return corrupt(d->row, f, "null bits are set where none may be");
    }
    *at += f->head_bytes;
    return QUIRE_OK;
}

static int read_struct(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    const uint8_t *head = *at;
    QUIRE_TRY(reserve(d, f, 1));
    QUIRE_TRY(read_head(d, f, at, end));
    for (uint32_t c = 0; c < f->child_count; c++) {
        const field *child = &f->children[c];
        bool null = child->nullable && bit_get(head, child->null_bit);
        if (is_fixed(child)) {
            QUIRE_TRY(read_fixed(d, child, head + child->fixed_offset, null));
        } else {
            QUIRE_TRY(null ? append_null(d, child) : read_value(d, child, at, end));
        }
    }
    d->builders[f->index].length++;
    return QUIRE_OK;
}

/* A value that is not null and not of fixed width. */
static int read_value(decoder *d, const field *f, const uint8_t **at, const uint8_t *end) {
    builder *b = &d->builders[f->index];
    uint64_t count = (uint64_t)f->item_count;
    switch (f->form) {
    case FORM_NULL:
        return corrupt(d->row, f, "a column of type null holds a value");
    case FORM_STRUCT:
        return read_struct(d, f, at, end);
    case FORM_BYTES: {
        const uint8_t *bytes;
        if (!varint_read(at, end, &count) || count > (size_t)(end - *at)) {
            return corrupt(d->row, f, TEXT_CUT);
        }
        bytes = *at;
        *at += count;
        return append_bytes(d, f, bytes, count);
    }
    case FORM_LIST:
        if (!varint_read(at, end, &count)) {
            return corrupt(d->row, f, TEXT_CUT);
        }
        QUIRE_TRY(reserve(d, f, 1));
        QUIRE_TRY(read_items(d, f->children, count, at, end));
        return end_at(d, f, b, d->builders[f->children[0].index].length);
    default:
        QUIRE_TRY(reserve(d, f, 1));
        QUIRE_TRY(read_items(d, f->children, count, at, end));
        b->length++;
        return QUIRE_OK;
    }
}

INLINE int read_slots(decoder *d, const field *f, int64_t count, const uint8_t *const *head, size_t width) {
    builder *b = &d->builders[f->index];
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = head[r] + f->fixed_offset;
        if (QUIRE_UNLIKELY(f->nullable && bit_get(head[r], f->null_bit))) {
            d->row += r;
            QUIRE_TRY(read_fixed(d, f, p, true));
            d->row -= r;
        } else {
            memcpy(b->data + (size_t)b->length++ * width, p, width);
        }
    }
    return QUIRE_OK;
}

/* A fixed-width column of count rows, room reserved, heads checked. */
static int read_fixed_column(decoder *d, const field *f, int64_t count, const uint8_t *const *head) {
    int64_t row = d->row;
    switch (f->form == FORM_BOOL ? 0 : f->width) {
    case 1:
        return read_slots(d, f, count, head, 1);
    case 2:
        return read_slots(d, f, count, head, 2);
    case 4:
        return read_slots(d, f, count, head, 4);
    case 8:
        return read_slots(d, f, count, head, 8);
    case 16:
        return read_slots(d, f, count, head, 16);
    default:
        for (int64_t r = 0; r < count; r++) {
            d->row = row + r;
            QUIRE_TRY(read_fixed(d, f, head[r] + f->fixed_offset, f->nullable && bit_get(head[r], f->null_bit)));
        }
        d->row = row;
        return QUIRE_OK;
    }
}

static int read_rows(decoder *d, const field *f, int64_t count, const uint8_t **at, const uint8_t *const *end,
                     const uint8_t **head) {
    int64_t row = d->row;
    for (int64_t r = 0; r < count; r++) {
        d->row = row + r;
        head[r] = at[r];
        QUIRE_TRY(read_head(d, f, &at[r], end[r]));
    }
    for (uint32_t c = 0; c < f->child_count; c++) {
        const field *child = &f->children[c];
        d->row = row;
        if (is_fixed(child)) {
            QUIRE_TRY(read_fixed_column(d, child, count, head));
            continue;
        }
        for (int64_t r = 0; r < count; r++) {
            d->row = row + r;
            bool null = child->nullable && bit_get(head[r], child->null_bit);
            QUIRE_TRY(null ? append_null(d, child) : read_value(d, child, &at[r], end[r]));
        }
    }
    d->row = row;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ decode: rows */

/* count rows from first on, none of them null, count at most BLOCK_ROWS. */
static int decode_block(decoder *d, const quire_rows *rows, int64_t first, int64_t count) {
    const field *root = d->codec->fields;
    const uint8_t *at[BLOCK_ROWS], *end[BLOCK_ROWS], *head[BLOCK_ROWS];
    static const uint8_t nothing[1];
    for (int64_t r = 0; r < count; r++) {
        size_t bytes;
        at[r] = quire_rows_at(rows, first + r, &bytes);
        at[r] = bytes == 0 ? nothing : at[r];
        end[r] = at[r] + bytes;
    }
    d->row = first;
    if (d->codec->ordered) {
        for (uint32_t c = 0; c < root->child_count; c++) {
            QUIRE_TRY(read_keys(d, &root->children[c], count, at, end));
        }
    } else {
        QUIRE_TRY(read_rows(d, root, count, at, end, head));
    }
    for (int64_t r = 0; r < count; r++) {
        if (at[r] != end[r]) {
            return corrupt(first + r, &root->children[root->child_count - 1], "bytes are left behind the last column");
        }
    }
    d->builders[0].length += count;
    return QUIRE_OK;
}

static int decode_rows(decoder *d, const quire_rows *rows) {
    for (uint32_t i = 0; i < d->codec->field_count; i++) {
        QUIRE_TRY(grow_values(&d->codec->fields[i], &d->builders[i], 64));
    }
    const field *root = d->codec->fields;
    QUIRE_TRY(reserve(d, root, rows->row_count));
    for (uint32_t c = 0; c < root->child_count; c++) {
        QUIRE_TRY(reserve(d, &root->children[c], rows->row_count));
    }
    for (int64_t first = 0; first < rows->row_count;) {
        d->row = first;
        if (quire_rows_null(rows, first)) {
            QUIRE_TRY(append_null(d, root));
            first++;
            continue;
        }
        int64_t count = 1;
        while (count < BLOCK_ROWS && first + count < rows->row_count && !quire_rows_null(rows, first + count)) {
            count++;
        }
        QUIRE_TRY(decode_block(d, rows, first, count));
        first += count;
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ decode: result */

/* What an array's release has to free, in one block with the arrays of its children. */
typedef struct {
    const void *buffers[3];
    struct ArrowArray **child_pointers;
    struct ArrowArray children[];
} holder;

static void array_release(struct ArrowArray *array) {
    holder *h = array->private_data;
    for (int64_t i = 0; i < array->n_children; i++) {
        if (array->children[i]->release != NULL) {
            array->children[i]->release(array->children[i]);
        }
    }
    for (int64_t i = 0; i < array->n_buffers; i++) {
        free((void *)h->buffers[i]);
    }
    free(h);
    array->release = NULL;
}

static void builder_free(builder *b) {
    free(b->validity);
    free(b->data);
    free(b->offsets32);
    free(b->offsets64);
    *b = (builder){0};
}

/* Moves the builder's buffers into h; returns how many buffers the type has. */
static int64_t hand_over(const field *f, builder *b, holder *h) {
    int64_t count = 0;
    if (f->form != FORM_NULL) {
        h->buffers[count++] = b->null_count > 0 ? b->validity : NULL;
        b->validity = b->null_count > 0 ? NULL : b->validity;
    }
    if (f->form == FORM_BYTES || f->form == FORM_LIST) {
        h->buffers[count++] = f->large ? (void *)b->offsets64 : (void *)b->offsets32;
        b->offsets64 = NULL;
        b->offsets32 = NULL;
    }
    if (is_fixed(f) || f->form == FORM_BYTES) {
        h->buffers[count++] = b->data;
        b->data = NULL;
    }
    builder_free(b);
    return count;
}

/* Whatever happens, array is then either released or can be. */
static int array_make(decoder *d, const field *f, struct ArrowArray *array) {
    builder *b = &d->builders[f->index];
    holder *h = calloc(1, sizeof *h + f->child_count * (sizeof(struct ArrowArray) + sizeof(struct ArrowArray *)));
    *array = (struct ArrowArray){0};
    if (h == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a decoded column");
    }
    h->child_pointers = (struct ArrowArray **)(h->children + f->child_count);
    for (uint32_t c = 0; c < f->child_count; c++) {
        h->child_pointers[c] = &h->children[c];
    }
    array->length = b->length;
    array->null_count = f->form == FORM_NULL ? b->length : b->null_count;
    array->n_buffers = hand_over(f, b, h);
    array->buffers = h->buffers;
    array->n_children = f->child_count;
    array->children = f->child_count > 0 ? h->child_pointers : NULL;
    array->private_data = h;
    array->release = array_release;
    for (uint32_t c = 0; c < f->child_count; c++) {
        QUIRE_TRY(array_make(d, &f->children[c], &h->children[c]));
    }
    return QUIRE_OK;
}

int quire_codec_decode(const quire_codec *codec, const quire_rows *rows, struct ArrowArray *batch) {
    decoder d = {.codec = codec, .builders = calloc(codec->field_count, sizeof(builder))};
    struct ArrowArray made = {0};
    if (d.builders == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory to decode %u columns", codec->field_count);
    }
    int rc = decode_rows(&d, rows);
    if (rc == QUIRE_OK) {
        rc = array_make(&d, codec->fields, &made);
    }
    for (uint32_t i = 0; i < codec->field_count; i++) {
        builder_free(&d.builders[i]);
    }
    free(d.builders);
    if (rc == QUIRE_OK) {
        *batch = made;
    } else if (made.release != NULL) {
        made.release(&made);
    }
    return rc;
}
