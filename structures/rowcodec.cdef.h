struct ArrowSchema {
    void (*release)(struct ArrowSchema *);
    ...;
};
struct ArrowArray {
    void (*release)(struct ArrowArray *);
    ...;
};
typedef struct quire_codec quire_codec;
int quire_codec_create(const struct ArrowSchema *schema, bool ordered, quire_codec **codec);
void quire_codec_destroy(quire_codec *codec);
int quire_codec_encode(const quire_codec *codec, const struct ArrowArray *batch, quire_column *rows);
int quire_codec_decode(const quire_codec *codec, const quire_rows *rows, struct ArrowArray *batch);
