/* rowcodec.h -- typed rows to bytes and back, in bulk, over the Arrow C data interface.
 *
 * Purpose     Maps keep bytes under bytes. A codec turns the rows of an Arrow record batch into such bytes and back: an
 *             ordered codec (for keys) so that memcmp on the bytes gives the order of the rows, a plain one (for
 *             values) so that they are short and quick to read.
 * Layout      docs/typed-records.md, every byte.
 * Invariants  I1 encode then decode gives the row again, bit for bit; in an ordered codec every NaN becomes one NaN and
 *                -0.0 becomes 0.0.
 *             I2 decode accepts only what encode writes: bytes that decode encode again to the same bytes.
 *             I3 ordered: memcmp order of two rows' bytes is the order of the rows, column by column, nulls first.
 *             I4 ordered: the bytes of the first k columns are a prefix of the row's bytes, whatever follows them.
 * Ownership   A codec copies what it needs of the schema. Neither the schema nor a batch given to encode is released
 *             here. A batch made by decode belongs to the caller, who ends it through its release callback; it outlives
 *             the codec.
 * Threads     A codec is never changed after quire_codec_create: any number of threads may use it at once.
 * Errors      QUIRE_E_INVALID for types and arrays that do not fit, QUIRE_E_CORRUPT for bytes that no encode wrote
 *             (naming row and column), QUIRE_E_FULL when a column with 32-bit offsets would pass 2 GiB, QUIRE_E_NOMEM.
 */
#ifndef QUIRE_ROWCODEC_H
#define QUIRE_ROWCODEC_H

#include "kv.h"

/* As the Arrow specification gives them; the macro keeps them from being declared twice beside another copy. */
#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE           2
#define ARROW_FLAG_MAP_KEYS_SORTED    4

struct ArrowSchema {
    const char *format;
    const char *name;
    const char *metadata;
    int64_t flags;
    int64_t n_children;
    struct ArrowSchema **children;
    struct ArrowSchema *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

#endif

typedef struct quire_codec quire_codec;

/* schema: a struct type, its children the columns (what a record batch's schema exports to). ordered: for keys. */
int quire_codec_create(const struct ArrowSchema *schema, bool ordered, quire_codec **codec);
void quire_codec_destroy(quire_codec *codec);

/* Appends one row per row of batch, null where the struct itself is null. On failure rows is as it was. */
int quire_codec_encode(const quire_codec *codec, const struct ArrowArray *batch, quire_column *rows);

/* Makes a struct array with one row per row given; a null row becomes a null struct over null children. */
int quire_codec_decode(const quire_codec *codec, const quire_rows *rows, struct ArrowArray *batch);

#endif
