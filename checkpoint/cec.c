/* cec.c -- writes and loads the log of cec.h, and decides what to write again.
 *
 * Purpose     See cec.h. A commit goes over the arena twice: first over what changed, as a delta does; then, in the order of their
 *             places, over pages with the oldest footprints, whose records are written again and stamped with the epoch being written. So
 *             what changed is counted before it is decided how much to write again, without a walk of its own for that.
 *
 *             Recovery reads forward from `since`, not backward until every live key was seen. Both end with the same records: what a
 *             later version says replaces what an earlier one said. Forward needs no set of keys seen and none of keys removed (a
 *             removal simply removes), and stamps come out in the order of the versions, so that the log goes on where it was.
 *
 * Layout      In memory only. For each page of each family 8 bytes: a place at or before that of the oldest footprint on the page
 *             (NO_PLACE: the page holds no records). The version that this place is in is always the true one, since stamps tell it; within
 *             the version it is as exact as could be known. Bit 63, WILD: records came from other pages, so that the page's number says
 *             nothing of where in a version its records are. Bit 62, FRESH: so far known only from a stamp.
 *             For each version: where it starts, how many records it has and how many of them are footprints (`live`), and waypoints:
 *             the place reached when the records of a page began, one for each payload and family. What changed is written in the order
 *             of families and pages, so a page's records are not before the last waypoint that is not past it.
 *
 * Invariants  I1 versions ascend, and so do their epochs and starts.   I2 families and waypoints are in the order of serial and page.
 *             I3 the sum of live over all versions is the number of live keys.
 *             I4 whatever a write changes here is undone unless it is followed by quire_cec_committed: places by the undo list, or all
 *                of it by counting anew where families came or went; `left` is `live` as it will be.
 * Ownership   As cec.h. Handles on maps are open only during a write.
 * Threads     As cec.h.
 * Errors      Want of memory for the copy of a page that is written again fails nothing: less is written again.
 */
#include "cec.h"
#include "records.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#define NO_PLACE   UINT64_MAX
#define WILD       ((uint64_t)1 << 63)
#define FRESH      ((uint64_t)1 << 62)
#define PLACE_MASK (FRESH - 1)
/* Records between waypoints of a version that was not written here. */
#define WAYPOINT_RECORDS 512u
/* Versions that quire_cec_restored can go back. */
#define HISTORY 64u
/* An extent that came over the target from elsewhere (a restart, another target) is brought back in so many commits. */
#define CATCH_UP_COMMITS 16u
/* How far, in records, the first look for old pages reaches at least. */
#define REACH_MIN 256u

typedef struct {
    uint32_t serial;
    quire_page_id page;
    uint64_t place;
} waypoint;

typedef struct {
    uint64_t version;
    uint64_t since;
    uint64_t start;
    uint64_t records;
    uint64_t live;
    uint64_t left;  /* live, after the write that is not yet committed */
    uint32_t epoch; /* the highest stamp in it */
    bool counting;  /* waypoints are being made from where its records are found */
    waypoint *waypoints;
    size_t waypoint_count, waypoint_capacity;
} log_version;

typedef struct {
    quire_set_info info;
    uint32_t serial;
    uint64_t *places;
    uint32_t page_limit;
    quire_kv *kv; /* during a write */
} log_family;

typedef struct {
    uint32_t serial;
    quire_page_id page;
    uint64_t place;
} old_place;

struct quire_cec {
    quire_arena *arena;
    quire_cec_policy policy;
    log_version *versions; /* one more than version_count: the one being written */
    size_t version_count, version_capacity;
    log_family *families;
    size_t family_count;
    uint32_t serial_next;
    uint32_t epoch;   /* of the state that the places are of; 0: they must be found anew */
    uint64_t applied; /* records since the last version loaded */
    bool missed;      /* a bound stood against the target in the last commit */
    bool inherited;   /* no commit here has been within the target yet */
    bool writing;     /* a write waits for quire_cec_committed */
    bool writing_missed, writing_within, writing_families;
    uint32_t writing_epoch; /* of the last commit at that time */
    old_place *undo;
    size_t undo_count, undo_capacity;
};

static int no_memory(const char *what) {
    return quire_fail(QUIRE_E_NOMEM, "no memory for %s of a log", what);
}

/* Makes room for one more item. */
static int room(void **items, size_t count, size_t *capacity, size_t item_bytes, const char *what) {
    if (count < *capacity) {
        return QUIRE_OK;
    }
    size_t wanted = *capacity == 0 ? 16 : *capacity * 2;
    void *grown = realloc(*items, wanted * item_bytes);
    if (grown == NULL) {
        return no_memory(what);
    }
    *items = grown;
    *capacity = wanted;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ versions */

static uint64_t log_end(const quire_cec *cec) {
    if (cec->version_count == 0) {
        return 0;
    }
    const log_version *last = &cec->versions[cec->version_count - 1];
    return last->start + last->records;
}

/* The version being written, or the one that is added next. */
static log_version *version_next(quire_cec *cec) {
    return &cec->versions[cec->version_count];
}

static int version_begin(quire_cec *cec, uint64_t version) {
    if (cec->version_count != 0 && version <= cec->versions[cec->version_count - 1].version) {
        return quire_fail(QUIRE_E_INVALID,
                          "version %" PRIu64 " cannot follow version %" PRIu64
                          " of the log: versions ascend; say first that an older one was restored",
                          version, cec->versions[cec->version_count - 1].version);
    }
    size_t capacity = cec->version_capacity;
    void *versions = cec->versions;
    QUIRE_TRY(room(&versions, cec->version_count + 1, &capacity, sizeof *cec->versions, "the versions"));
    cec->versions = versions;
    cec->version_capacity = capacity;
    *version_next(cec) = (log_version){.version = version, .start = log_end(cec)};
    return QUIRE_OK;
}

static void versions_cut(quire_cec *cec, size_t count) {
    for (size_t i = count; i < cec->version_count; i++) {
        free(cec->versions[i].waypoints);
    }
    cec->version_count = count;
}

/* The version that records of this stamp were written in; NULL if no version has them. */
static log_version *version_of_stamp(quire_cec *cec, uint32_t stamp) {
    size_t low = 0, high = cec->version_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (cec->versions[middle].epoch < stamp) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < cec->version_count ? &cec->versions[low] : NULL;
}

static int version_expect(quire_cec *cec, uint32_t stamp, log_version **version) {
    *version = version_of_stamp(cec, stamp);
    if (*version == NULL) {
        return quire_fail(QUIRE_E_INVALID,
                          "the arena holds records of epoch %" PRIu32
                          " that no version of the log has: say which version they came with (quire_cec_foreign)",
                          stamp);
    }
    return QUIRE_OK;
}

/* The version that a place is in, of those committed and the one being written. */
static log_version *version_of_place(quire_cec *cec, uint64_t place) {
    size_t low = 0, high = cec->version_count;
    while (low < high) {
        size_t middle = low + (high - low + 1) / 2;
        if (cec->versions[middle].start <= place) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return &cec->versions[low];
}

static int waypoint_add(log_version *version, uint32_t serial, quire_page_id page, uint64_t place) {
    void *waypoints = version->waypoints;
    QUIRE_TRY(room(&waypoints, version->waypoint_count, &version->waypoint_capacity, sizeof *version->waypoints,
                   "the waypoints"));
    version->waypoints = waypoints;
    version->waypoints[version->waypoint_count++] = (waypoint){serial, page, place};
    return QUIRE_OK;
}

/* A place that no record which this version wrote from the page lies before. */
static uint64_t version_place(const log_version *version, uint32_t serial, quire_page_id page) {
    size_t low = 0, high = version->waypoint_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const waypoint *at = &version->waypoints[middle];
        if (at->serial < serial || (at->serial == serial && at->page <= page)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low == 0 ? version->start : version->waypoints[low - 1].place;
}

/* ------------------------------------------------------------------------------------------------ families and places */

static log_family *family_find(quire_cec *cec, const char *name) {
    for (size_t i = 0; i < cec->family_count; i++) {
        if (strcmp(cec->families[i].info.name, name) == 0) {
            return &cec->families[i];
        }
    }
    return NULL;
}

static int family_add(quire_cec *cec, const quire_set_info *info) {
    log_family *families = realloc(cec->families, (cec->family_count + 1) * sizeof *families);
    if (families == NULL) {
        return no_memory("the families");
    }
    cec->families = families;
    families[cec->family_count++] = (log_family){.info = *info, .serial = cec->serial_next++};
    return QUIRE_OK;
}

static void family_remove(quire_cec *cec, log_family *family) {
    size_t index = (size_t)(family - cec->families);
    quire_kv_close(family->kv);
    free(family->places);
    cec->family_count--;
    memmove(family, family + 1, (cec->family_count - index) * sizeof *family);
}

static void families_close(quire_cec *cec) {
    for (size_t i = 0; i < cec->family_count; i++) {
        quire_kv_close(cec->families[i].kv);
        cec->families[i].kv = NULL;
    }
}

static uint64_t place_get(const log_family *family, quire_page_id page) {
    return page < family->page_limit ? family->places[page] : NO_PLACE;
}

static int place_set(log_family *family, quire_page_id page, uint64_t place) {
    if (page >= family->page_limit) {
        if (place == NO_PLACE) {
            return QUIRE_OK;
        }
        uint32_t limit = page < 64 ? 64 : page + page / 2 + 1;
        uint64_t *places = realloc(family->places, (size_t)limit * sizeof *places);
        if (places == NULL) {
            return no_memory("the pages");
        }
        for (uint32_t i = family->page_limit; i < limit; i++) {
            places[i] = NO_PLACE;
        }
        family->places = places;
        family->page_limit = limit;
    }
    family->places[page] = place;
    return QUIRE_OK;
}

/* As place_set, to be undone unless the write is committed. */
static int place_change(quire_cec *cec, log_family *family, quire_page_id page, uint64_t place) {
    uint64_t before = place_get(family, page);
    if (before == place) {
        return QUIRE_OK;
    }
    void *undo = cec->undo;
    QUIRE_TRY(room(&undo, cec->undo_count, &cec->undo_capacity, sizeof *cec->undo, "the pages"));
    cec->undo = undo;
    cec->undo[cec->undo_count++] = (old_place){family->serial, page, before};
    return place_set(family, page, place);
}

/* The place of the oldest footprint; log's end if there is none. */
static uint64_t place_oldest(const quire_cec *cec, uint64_t end) {
    uint64_t oldest = end;
    for (size_t i = 0; i < cec->family_count; i++) {
        const log_family *family = &cec->families[i];
        for (uint32_t page = 0; page < family->page_limit; page++) {
            uint64_t place = family->places[page];
            if (place != NO_PLACE && (place & PLACE_MASK) < oldest) {
                oldest = place & PLACE_MASK;
            }
        }
    }
    return oldest;
}

/* A write that was not committed never was. */
static void writing_forget(quire_cec *cec) {
    families_close(cec);
    if (!cec->writing) {
        return;
    }
    cec->writing = false;
    free(version_next(cec)->waypoints);
    if (cec->writing_families) {
        cec->epoch = 0;
    }
    log_family *family = NULL;
    while (cec->undo_count > 0) {
        const old_place *old = &cec->undo[--cec->undo_count];
        for (size_t i = 0; i < cec->family_count && (family == NULL || family->serial != old->serial); i++) {
            family = &cec->families[i];
        }
        if (family != NULL && family->serial == old->serial && old->page < family->page_limit) {
            family->places[old->page] = old->place;
        }
    }
}

/* ------------------------------------------------------------------------------------------------ finding all places anew */

typedef struct {
    quire_cec *cec;
    log_family *family;
    quire_page_id page;
    uint32_t stamp_oldest; /* on the page so far */
} place_walk;

static int place_found(void *context, quire_page_id page, uint32_t stamp) {
    place_walk *walk = context;
    log_version *version;
    QUIRE_TRY(version_expect(walk->cec, stamp, &version));
    uint64_t place = version_place(version, walk->family->serial, page);
    if (version->counting) {
        /* As if the version had been written from the pages as they are now; that is how most of a log comes out of its recovery. */
        place = version->start + version->live;
        if (version->live % WAYPOINT_RECORDS == 0) {
            QUIRE_TRY(waypoint_add(version, walk->family->serial, page, place));
        }
    }
    version->live++;
    if (page != walk->page) {
        walk->page = page;
        walk->stamp_oldest = UINT32_MAX;
    }
    if (stamp >= walk->stamp_oldest) {
        return QUIRE_OK;
    }
    walk->stamp_oldest = stamp;
    return place_set(walk->family, page, place);
}

static int family_places(quire_cec *cec, quire_snap *snap, log_family *family) {
    quire_kv *kv;
    QUIRE_TRY(quire_kv_open_snap(snap, family->info.name, (quire_kind)family->info.kind, &kv));
    for (uint32_t page = 0; page < family->page_limit; page++) {
        family->places[page] = NO_PLACE;
    }
    place_walk walk = {.cec = cec, .family = family, .page = QUIRE_NO_PAGE};
    int rc = quire_kv_stamps(kv, place_found, &walk);
    quire_kv_close(kv);
    return rc;
}

/* Families keep their serial, so that waypoints of versions written here stay of use. */
static int families_match(quire_cec *cec, const quire_set_info *infos, size_t count) {
    for (size_t i = cec->family_count; i-- > 0;) {
        const quire_set_info *info = quire_records_family(infos, count, cec->families[i].info.name);
        if (info == NULL || info->kind != cec->families[i].info.kind) {
            family_remove(cec, &cec->families[i]);
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (quire_records_is_map(infos[i].kind) && family_find(cec, infos[i].name) == NULL) {
            QUIRE_TRY(family_add(cec, &infos[i]));
        }
    }
    return QUIRE_OK;
}

static int places_find_in(quire_cec *cec, quire_snap *snap, const quire_set_info *infos, size_t count) {
    QUIRE_TRY(families_match(cec, infos, count));
    for (size_t i = 0; i < cec->version_count; i++) {
        log_version *version = &cec->versions[i];
        version->live = 0;
        version->counting = version->waypoint_count == 0;
    }
    for (size_t i = 0; i < cec->family_count; i++) {
        QUIRE_TRY(family_places(cec, snap, &cec->families[i]));
    }
    return QUIRE_OK;
}

static int places_find(quire_cec *cec, quire_snap *snap) {
    quire_set_info *infos;
    size_t count;
    int rc = quire_records_families(cec->arena, snap, &infos, &count);
    if (rc == QUIRE_OK) {
        rc = places_find_in(cec, snap, infos, count);
    }
    free(infos);
    cec->epoch = rc == QUIRE_OK ? quire_snap_epoch(snap) : 0;
    return rc;
}

/* ------------------------------------------------------------------------------------------------ writing what changed */

typedef struct {
    quire_page_id to;
    uint64_t place;
} move;

typedef struct {
    quire_cec *cec;
    quire_records records;
    log_family *family;
    uint32_t since; /* epoch of the older state */
    uint64_t begin; /* place of this version's first record */
    uint64_t place; /* of the next record */
    quire_page_id page;
    uint64_t page_place; /* of the first record written from page */
    move *moves;
    size_t move_count, move_capacity;
    uint64_t check_bytes;
    uint64_t check_nanos_end;
    quire_cec_summary summary;
} log_writer;

static int footprint_leaves(quire_cec *cec, uint32_t stamp) {
    log_version *version;
    QUIRE_TRY(version_expect(cec, stamp, &version));
    version->left--;
    return QUIRE_OK;
}

static int changed_write(void *context, quire_page_id page, uint32_t stamp_before, const uint8_t *key, size_t key_bytes,
                         const uint8_t *values, size_t values_bytes, uint64_t value_count) {
    log_writer *writer = context;
    quire_records *records = &writer->records;
    log_version *version = version_next(writer->cec);
    bool goes_on = records->family_written && records->payload.count < QUIRE_DELTA_PAYLOAD_BYTES;
    QUIRE_TRY(quire_records_begin(records));
    if (!goes_on) {
        QUIRE_TRY(waypoint_add(version, writer->family->serial, page, writer->place));
    }
    if (page != writer->page) {
        writer->page = page;
        writer->page_place = writer->place;
    }
    if (stamp_before != 0) {
        QUIRE_TRY(footprint_leaves(writer->cec, stamp_before));
    }
    writer->place++;
    if (values == NULL) {
        writer->summary.results++;
        return quire_records_add(records,
                                 &(quire_delta_record){.op = QUIRE_DELTA_REMOVE, .key = key, .key_bytes = key_bytes});
    }
    version->left++;
    if (stamp_before == 0) {
        writer->summary.opens++;
        return quire_records_add(records, &(quire_delta_record){.op = QUIRE_DELTA_OPEN,
                                                                .key = key,
                                                                .key_bytes = key_bytes,
                                                                .value = values,
                                                                .value_bytes = values_bytes,
                                                                .value_count = value_count});
    }
    writer->summary.footprints++;
    return quire_records_put(records, key, key_bytes, values, values_bytes, value_count);
}

static int moved_note(void *context, quire_page_id from, quire_page_id to, uint32_t stamp) {
    log_writer *writer = context;
    log_version *version;
    QUIRE_TRY(version_expect(writer->cec, stamp, &version));
    uint64_t place = place_get(writer->family, from);
    place = place == NO_PLACE ? 0 : place & PLACE_MASK;
    void *moves = writer->moves;
    QUIRE_TRY(room(&moves, writer->move_count, &writer->move_capacity, sizeof *writer->moves, "records that moved"));
    writer->moves = moves;
    writer->moves[writer->move_count++] = (move){to, place < version->start ? version->start : place};
    return QUIRE_OK;
}

static int moves_account(log_writer *writer) {
    for (size_t i = 0; i < writer->move_count; i++) {
        const move *moved = &writer->moves[i];
        uint64_t place = place_get(writer->family, moved->to);
        bool known = place != NO_PLACE && (place & FRESH) == 0;
        uint64_t lower = known && (place & PLACE_MASK) < moved->place ? place & PLACE_MASK : moved->place;
        QUIRE_TRY(place_change(writer->cec, writer->family, moved->to, lower | WILD));
    }
    writer->move_count = 0;
    return QUIRE_OK;
}

/* The place of a page that keeps records from before, the oldest of which has this stamp. */
static int place_kept(log_writer *writer, quire_page_id page, uint32_t stamp, uint64_t *place) {
    log_version *version;
    QUIRE_TRY(version_expect(writer->cec, stamp, &version));
    uint64_t before = place_get(writer->family, page);
    if (before == NO_PLACE) {
        *place = version->start | WILD | FRESH;
        return QUIRE_OK;
    }
    bool wild = (before & WILD) != 0;
    uint64_t lowest = wild ? version->start : version_place(version, writer->family->serial, page);
    uint64_t known = before & PLACE_MASK;
    *place = (known > lowest ? known : lowest) | (wild ? WILD : 0);
    return QUIRE_OK;
}

static int page_account(void *context, quire_page_id page, uint32_t stamp_oldest) {
    log_writer *writer = context;
    uint64_t place = NO_PLACE;
    if (page >> 31 != 0) {
        return QUIRE_OK; /* of the directory */
    }
    if (stamp_oldest != UINT32_MAX && stamp_oldest > writer->since) {
        place = writer->page_place;
    } else if (stamp_oldest != UINT32_MAX) {
        QUIRE_TRY(place_kept(writer, page, stamp_oldest, &place));
    }
    return place_change(writer->cec, writer->family, page, place);
}

/* Records of a family that was cloned or loaded carry stamps from before: they are written in this version all the same. */
static int family_stamp(log_writer *writer) {
    uint32_t rest;
    for (uint32_t page = 0; page < quire_kv_page_limit(writer->family->kv); page++) {
        QUIRE_TRY(quire_kv_touch(writer->family->kv, page, writer->since, NULL, NULL, &rest));
    }
    return QUIRE_OK;
}

static int family_changes(log_writer *writer, quire_snap *older, bool was_there) {
    static const quire_footprint_visit visit = {changed_write, moved_note, page_account};
    log_family *family = writer->family;
    quire_kv *before = NULL;
    if (was_there) {
        QUIRE_TRY(quire_kv_open_snap(older, family->info.name, (quire_kind)family->info.kind, &before));
    } else {
        QUIRE_TRY(family_stamp(writer));
    }
    writer->records.family = &family->info;
    writer->records.family_written = false;
    writer->page = QUIRE_NO_PAGE;
    int rc = quire_kv_footprints(family->kv, before, &visit, writer);
    quire_kv_close(before);
    return rc == QUIRE_OK ? moves_account(writer) : rc;
}

static int stamp_leaves(void *context, quire_page_id page, uint32_t stamp) {
    (void)page;
    return footprint_leaves(context, stamp);
}

/* before: as quire_records_drops leaves it, names: as it was. */
static int families_drop(log_writer *writer, quire_snap *older, const quire_set_info *before,
                         const quire_set_info *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        log_family *family = before[i].name[0] != 0 ? NULL : family_find(writer->cec, names[i].name);
        if (family == NULL) {
            continue;
        }
        quire_kv *kv;
        writer->cec->writing_families = true;
        QUIRE_TRY(quire_kv_open_snap(older, names[i].name, (quire_kind)names[i].kind, &kv));
        int rc = quire_kv_stamps(kv, stamp_leaves, writer->cec);
        quire_kv_close(kv);
        QUIRE_TRY(rc);
        family_remove(writer->cec, family);
    }
    return QUIRE_OK;
}

static int families_open(log_writer *writer, const quire_set_info *now, size_t now_count) {
    quire_cec *cec = writer->cec;
    for (size_t i = 0; i < now_count; i++) {
        if (family_find(cec, now[i].name) == NULL) {
            cec->writing_families = true;
            QUIRE_TRY(family_add(cec, &now[i]));
        }
    }
    for (size_t i = 0; i < cec->family_count; i++) {
        log_family *family = &cec->families[i];
        uint64_t keys;
        QUIRE_TRY(quire_kv_open(cec->arena, family->info.name, (quire_kind)family->info.kind, &family->kv));
        QUIRE_TRY(quire_kv_count(family->kv, &keys));
        QUIRE_TRY(quire_records_name(&writer->records, QUIRE_DELTA_FAMILY, &family->info));
        writer->summary.keys += keys;
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ writing again */

static uint64_t nanos_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool bound_reached(const log_writer *writer) {
    const quire_cec_policy *policy = &writer->cec->policy;
    return (policy->bytes_max != 0 && writer->check_bytes >= policy->bytes_max) ||
           (policy->nanos_max != 0 && nanos_now() >= writer->check_nanos_end);
}

static double target_records(const log_writer *writer) {
    return writer->cec->policy.extent_target * (double)writer->summary.keys;
}

static bool within_target(const log_writer *writer, uint64_t oldest) {
    return (double)(writer->place - oldest) <= target_records(writer);
}

/* How many of the oldest footprints to write again now, so that the target can be kept from now on whatever changes later.
 *
 * Let l(k) be the place of the k-th oldest footprint, E the log's end. At worst nothing old ever changes by itself. Writing one old
 * record again for every Q - 1 changed ones, the end is at E + k * Q when the k-th comes first; so the target is safe as long as
 * E - l(k) + k * Q <= Q * keys for every k. A commit of u changes moves E by u, and each record written again moves E by one and every k
 * down by one, a gain of Q - 1. What is missing most, divided by Q - 1, is what must be written; it is never more than u / (Q - 1) if
 * nothing was missing before and no keys were removed, and it is 0 while the footprints are new enough. Within a version footprints are
 * taken to be spread evenly. */
static uint64_t checks_needed(const log_writer *writer, uint64_t oldest) {
    const quire_cec *cec = writer->cec;
    double target = cec->policy.extent_target, needed = 0, older = 0;
    for (size_t i = 0; i < cec->version_count; i++) {
        const log_version *version = &cec->versions[i];
        if (version->left == 0) {
            continue;
        }
        double first = (double)(version->start < oldest ? oldest : version->start);
        double last = (double)(version->start + version->records) - 1;
        double ranks[2] = {older, older + (double)version->left - 1};
        double places[2] = {first, last < first ? first : last};
        for (int end = 0; end < 2; end++) {
            double missing = (double)writer->place - places[end] + ranks[end] * target - target_records(writer);
            double wanted = missing / (target - 1);
            wanted = wanted < ranks[end] + 1 ? wanted : ranks[end] + 1;
            needed = needed < wanted ? wanted : needed;
        }
        older += (double)version->left;
    }
    uint64_t whole = (uint64_t)needed;
    return whole + ((double)whole < needed);
}

/* About where the footprint is that so many are older than. */
static uint64_t place_of_rank(const quire_cec *cec, uint64_t rank, uint64_t end) {
    for (size_t i = 0; i < cec->version_count; i++) {
        const log_version *version = &cec->versions[i];
        if (rank < version->left) {
            return version->start + (uint64_t)((double)version->records * ((double)rank + 1) / (double)version->left);
        }
        rank -= version->left;
    }
    return end;
}

typedef struct {
    uint64_t place;
    log_family *family;
    quire_page_id page;
} candidate;

static int candidate_order(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->place != b->place) {
        return a->place < b->place ? -1 : 1;
    }
    if (a->family != b->family) {
        return a->family < b->family ? -1 : 1;
    }
    return (a->page > b->page) - (a->page < b->page);
}

/* Pages with places before limit, the oldest first. */
static int candidates_find(const quire_cec *cec, uint64_t limit, candidate **found, size_t *count) {
    size_t capacity = 0;
    void *items = NULL;
    *count = 0;
    int rc = QUIRE_OK;
    for (size_t i = 0; rc == QUIRE_OK && i < cec->family_count; i++) {
        log_family *family = &cec->families[i];
        for (uint32_t page = 0; rc == QUIRE_OK && page < family->page_limit; page++) {
            uint64_t place = family->places[page];
            if (place == NO_PLACE || (place & PLACE_MASK) >= limit) {
                continue;
            }
            rc = room(&items, *count, &capacity, sizeof **found, "old pages");
            if (rc == QUIRE_OK) {
                ((candidate *)items)[(*count)++] = (candidate){place & PLACE_MASK, family, page};
            }
        }
    }
    if (*count != 0) {
        qsort(items, *count, sizeof **found, candidate_order);
    }
    *found = items;
    return rc;
}

/* Between enter and leave: the payload is not handed on here. */
static int check_write(void *context, uint32_t stamp, const uint8_t *key, size_t key_bytes, const uint8_t *values,
                       size_t values_bytes, uint64_t value_count) {
    log_writer *writer = context;
    QUIRE_TRY(footprint_leaves(writer->cec, stamp));
    version_next(writer->cec)->left++;
    writer->place++;
    writer->summary.checks++;
    writer->check_bytes += key_bytes + values_bytes;
    return quire_records_add(&writer->records, &(quire_delta_record){.op = QUIRE_DELTA_CHECK,
                                                                     .key = key,
                                                                     .key_bytes = key_bytes,
                                                                     .value = values,
                                                                     .value_bytes = values_bytes,
                                                                     .value_count = value_count});
}

/* Writes the page's records with stamps up to stamp_max again; *place: of the page from now on. */
static int page_write_again(log_writer *writer, const candidate *old, uint32_t stamp_max, uint64_t *place) {
    log_family *family = old->family;
    uint32_t rest;
    if (writer->family != family) {
        writer->family = family;
        writer->records.family = &family->info;
        writer->records.family_written = false;
    }
    QUIRE_TRY(quire_records_begin(&writer->records));
    uint64_t first = writer->place;
    QUIRE_TRY(quire_kv_touch(family->kv, old->page, stamp_max, check_write, writer, &rest));
    if (rest == UINT32_MAX) {
        *place = first;
    } else if (rest > writer->since) { /* and some that were written by this commit before */
        *place = version_place(version_next(writer->cec), family->serial, old->page);
    } else {
        QUIRE_TRY(place_kept(writer, old->page, rest, place));
    }
    return place_change(writer->cec, family, old->page, *place);
}

typedef struct {
    uint64_t needed;
    uint64_t most;
    bool stopped;
    bool enough;
} again;

static bool again_ends(log_writer *writer, again *state, uint64_t oldest) {
    bool within = within_target(writer, oldest);
    uint64_t checks = writer->summary.checks;
    state->enough = oldest >= writer->begin || (within && checks >= state->needed) || checks >= state->most;
    if (!state->enough && bound_reached(writer) && (within || !writer->cec->missed)) {
        state->stopped = true;
    }
    return state->enough || state->stopped;
}

/* One round: pages with places before limit. */
static int again_round(log_writer *writer, again *state, uint64_t limit) {
    candidate *old;
    size_t count;
    quire_cec *cec = writer->cec;
    int rc = candidates_find(cec, limit, &old, &count);
    log_version *reached = version_of_place(cec, limit - 1);
    uint32_t stamp_whole = reached == cec->versions ? 0 : reached[-1].epoch; /* of versions that end before limit */
    uint64_t returned = NO_PLACE;
    for (size_t i = 0; rc == QUIRE_OK && i < count; i++) {
        if (again_ends(writer, state, old[i].place < returned ? old[i].place : returned)) {
            break;
        }
        uint32_t stamp_max = version_of_place(cec, old[i].place)->epoch;
        uint64_t place = NO_PLACE;
        rc = page_write_again(writer, &old[i], stamp_max < stamp_whole ? stamp_whole : stamp_max, &place);
        returned = (place & PLACE_MASK) < returned ? place & PLACE_MASK : returned;
    }
    free(old);
    if (rc == QUIRE_E_LIMIT || rc == QUIRE_E_NOSPACE || rc == QUIRE_E_NOMEM) {
        state->stopped = true; /* it can wait until there is room */
        return QUIRE_OK;
    }
    return rc;
}

/* Whether the extent was over the target before this commit. */
static bool came_over_target(const log_writer *writer, uint64_t oldest) {
    const quire_cec *cec = writer->cec;
    uint64_t keys = 0;
    for (size_t i = 0; i < cec->version_count; i++) {
        keys += cec->versions[i].live;
    }
    return oldest < writer->begin && (double)(writer->begin - oldest) > cec->policy.extent_target * (double)keys;
}

static int write_again(log_writer *writer) {
    quire_cec *cec = writer->cec;
    again state = {.most = UINT64_MAX};
    uint64_t oldest = place_oldest(cec, writer->place), reach = REACH_MIN;
    writer->check_nanos_end = nanos_now() + cec->policy.nanos_max;
    state.needed = checks_needed(writer, oldest);
    if (cec->inherited && !cec->missed && came_over_target(writer, oldest)) {
        double even = (double)(writer->place - writer->begin) / (cec->policy.extent_target - 1);
        state.most = writer->summary.keys / CATCH_UP_COMMITS + 1 + 2 * (uint64_t)even;
    }
    while (!again_ends(writer, &state, oldest)) {
        uint64_t left = state.needed > writer->summary.checks ? state.needed - writer->summary.checks : 0;
        uint64_t limit = place_of_rank(cec, left, writer->begin);
        limit = limit < oldest + reach ? oldest + reach : limit;
        limit = limit < writer->begin ? limit : writer->begin;
        QUIRE_TRY(again_round(writer, &state, limit));
        if (state.enough || state.stopped) {
            break;
        }
        oldest = place_oldest(cec, writer->place);
        reach *= 2;
    }
    cec->writing_missed = state.stopped;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ a version */

/* I3, and the oldest version that still has footprints; the one being written if there are none. */
static int footprints_account(log_writer *writer, const log_version **first) {
    quire_cec *cec = writer->cec;
    uint64_t keys = 0;
    *first = version_next(cec);
    for (size_t i = cec->version_count + 1; i-- > 0;) {
        keys += cec->versions[i].left;
        *first = cec->versions[i].left != 0 ? &cec->versions[i] : *first;
    }
    if (keys == writer->summary.keys) {
        return QUIRE_OK;
    }
    cec->epoch = 0;
    return quire_fail(QUIRE_E_CORRUPT,
                      "the log accounts for %" PRIu64 " keys where there are %" PRIu64
                      ": abort the version and write it again, which counts anew",
                      keys, writer->summary.keys);
}

static int summary_end(log_writer *writer) {
    quire_cec *cec = writer->cec;
    quire_cec_summary *summary = &writer->summary;
    log_version *version = version_next(cec);
    const log_version *first;
    QUIRE_TRY(footprints_account(writer, &first));
    uint64_t oldest = place_oldest(cec, writer->place);
    version->records = writer->place - writer->begin;
    version->since = first->version;
    summary->records = version->records;
    summary->extent = writer->place - oldest;
    summary->since = first->version;
    summary->to_read = writer->place - first->start;
    cec->writing_within = within_target(writer, oldest);
    cec->writing_missed = cec->writing_missed && !cec->writing_within;
    return QUIRE_OK;
}

static int version_write_of(log_writer *writer, quire_snap *older, const quire_set_info *now, size_t now_count,
                            quire_set_info *before, const quire_set_info *names, size_t before_count) {
    quire_cec *cec = writer->cec;
    QUIRE_TRY(quire_records_drops(&writer->records, cec->arena, older, before, before_count));
    QUIRE_TRY(families_drop(writer, older, before, names, before_count));
    QUIRE_TRY(families_open(writer, now, now_count));
    for (size_t i = 0; i < cec->family_count; i++) {
        writer->family = &cec->families[i];
        bool was_there = quire_records_family(before, before_count, writer->family->info.name) != NULL;
        QUIRE_TRY(family_changes(writer, older, was_there));
    }
    cec->writing_missed = cec->missed;
    if (writer->place != writer->begin) { /* an extent that does not grow is left alone */
        QUIRE_TRY(write_again(writer));
    }
    QUIRE_TRY(quire_records_flush(&writer->records));
    return summary_end(writer);
}

static int families_check(const quire_set_info *infos, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!quire_records_is_map(infos[i].kind)) {
            return quire_fail(QUIRE_E_INVALID, "'%s' is no map: a log holds maps and ordered maps", infos[i].name);
        }
    }
    return QUIRE_OK;
}

static int version_write(log_writer *writer, quire_snap *older) {
    quire_set_info *now = NULL, *before = NULL, *names = NULL;
    size_t now_count = 0, before_count = 0;
    quire_arena *arena = writer->cec->arena;
    int rc = quire_records_families(arena, NULL, &now, &now_count);
    if (rc == QUIRE_OK) {
        rc = families_check(now, now_count);
    }
    if (rc == QUIRE_OK && older != NULL) {
        rc = quire_records_families(arena, older, &before, &before_count);
    }
    if (rc == QUIRE_OK && older != NULL) {
        rc = quire_records_families(arena, older, &names, &before_count);
    }
    if (rc == QUIRE_OK) {
        rc = version_write_of(writer, older, now, now_count, before, names, before_count);
    }
    free(now);
    free(before);
    free(names);
    return rc;
}

/* The places as they are in the older state. */
static int places_prepare(quire_cec *cec, quire_snap *older) {
    if (older == NULL && cec->version_count != 0) {
        return quire_fail(QUIRE_E_INVALID, "a log that has version %" PRIu64 " goes on from its state: give a snapshot",
                          cec->versions[cec->version_count - 1].version);
    }
    if (older == NULL) {
        return families_match(cec, NULL, 0);
    }
    return quire_snap_epoch(older) == cec->epoch ? QUIRE_OK : places_find(cec, older);
}

int quire_cec_write(quire_cec *cec, quire_snap *older, uint64_t version, quire_delta_sink sink, void *context,
                    quire_cec_summary *summary) {
    writing_forget(cec);
    QUIRE_TRY(places_prepare(cec, older));
    QUIRE_TRY(version_begin(cec, version));
    for (size_t i = 0; i < cec->version_count; i++) {
        cec->versions[i].left = cec->versions[i].live;
    }
    cec->writing = true;
    cec->writing_families = false;
    cec->writing_epoch = quire_arena_epoch(cec->arena);
    log_writer writer = {.cec = cec,
                         .records = {.sink = sink, .context = context},
                         .since = older == NULL ? 0 : quire_snap_epoch(older),
                         .begin = log_end(cec),
                         .place = log_end(cec)};
    int rc = version_write(&writer, older);
    free(writer.moves);
    quire_records_free(&writer.records);
    families_close(cec);
    if (rc != QUIRE_OK) {
        writing_forget(cec);
        return rc;
    }
    *summary = writer.summary;
    return QUIRE_OK;
}

/* Versions that neither this state nor one that may be restored needs. */
static void versions_trim(quire_cec *cec) {
    size_t kept = cec->version_count > HISTORY ? cec->version_count - HISTORY : 0, gone = 0;
    uint64_t since = cec->versions[kept].since;
    while (gone < kept && cec->versions[gone].version < since) {
        free(cec->versions[gone++].waypoints);
    }
    cec->version_count -= gone;
    if (gone != 0) {
        memmove(cec->versions, cec->versions + gone, cec->version_count * sizeof *cec->versions);
    }
}

int quire_cec_committed(quire_cec *cec) {
    if (!cec->writing) {
        return quire_fail(QUIRE_E_INVALID, "no version of the log was written that could be committed");
    }
    log_version *version = version_next(cec);
    uint32_t epoch = quire_arena_epoch(cec->arena);
    if (version->records != 0 && epoch == cec->writing_epoch) {
        return quire_fail(QUIRE_E_INVALID,
                          "version %" PRIu64 " of the log is not committed in the arena: commit it first",
                          version->version);
    }
    version->epoch = epoch;
    cec->version_count++;
    for (size_t i = 0; i < cec->version_count; i++) {
        cec->versions[i].live = cec->versions[i].left;
    }
    cec->epoch = epoch;
    cec->missed = cec->writing_missed;
    cec->inherited = cec->inherited && !cec->writing_within;
    cec->writing = false;
    cec->undo_count = 0;
    versions_trim(cec);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ loading */

/* Counts the record; refuses what no log holds. */
static int record_admit(void *context, const quire_delta_record *record) {
    uint64_t *records = context;
    switch (record->op) {
    case QUIRE_DELTA_FAMILY:
        return quire_records_is_map(record->kind) ? QUIRE_OK
                                                  : quire_fail(QUIRE_E_CORRUPT, "a family of a log is no map");
    case QUIRE_DELTA_DROP:
        return QUIRE_OK;
    case QUIRE_DELTA_OPEN:
    case QUIRE_DELTA_PUT:
    case QUIRE_DELTA_PUT_ALL:
    case QUIRE_DELTA_REMOVE:
    case QUIRE_DELTA_CHECK:
        ++*records;
        return QUIRE_OK;
    default:
        return quire_fail(QUIRE_E_CORRUPT, "a record of kind %d stands in a log, whose records are whole",
                          (int)record->op);
    }
}

int quire_cec_apply(quire_cec *cec, const uint8_t *payload, size_t count) {
    uint64_t records = 0;
    writing_forget(cec);
    QUIRE_TRY(quire_records_apply(cec->arena, payload, count, record_admit, &records));
    cec->applied += records;
    return QUIRE_OK;
}

static void version_end(quire_cec *cec, uint64_t records, uint64_t since) {
    log_version *version = version_next(cec);
    version->epoch = quire_arena_epoch(cec->arena);
    version->records = records;
    version->since = since;
    cec->version_count++;
    cec->epoch = 0;
    cec->applied = 0;
    cec->missed = false;
    cec->inherited = true;
}

int quire_cec_loaded(quire_cec *cec, uint64_t version) {
    writing_forget(cec);
    QUIRE_TRY(version_begin(cec, version));
    version_end(cec, cec->applied, cec->version_count == 0 ? version : cec->versions[0].version);
    return QUIRE_OK;
}

/* Live keys of the state being written. */
static int keys_count_of(quire_arena *arena, const quire_set_info *infos, size_t count, uint64_t *keys) {
    for (size_t i = 0; i < count; i++) {
        quire_kv *kv;
        uint64_t in_family;
        if (!quire_records_is_map(infos[i].kind)) {
            continue;
        }
        QUIRE_TRY(quire_kv_open(arena, infos[i].name, (quire_kind)infos[i].kind, &kv));
        int rc = quire_kv_count(kv, &in_family);
        quire_kv_close(kv);
        QUIRE_TRY(rc);
        *keys += in_family;
    }
    return QUIRE_OK;
}

static int keys_count(quire_cec *cec, uint64_t *keys) {
    quire_set_info *infos;
    size_t count;
    *keys = 0;
    int rc = quire_records_families(cec->arena, NULL, &infos, &count);
    if (rc == QUIRE_OK) {
        rc = keys_count_of(cec->arena, infos, count, keys);
    }
    free(infos);
    return rc;
}

int quire_cec_complete(quire_cec *cec, uint64_t keys) {
    uint64_t found;
    QUIRE_TRY(keys_count(cec, &found));
    return found == keys ? QUIRE_OK
                         : quire_fail(QUIRE_E_CORRUPT,
                                      "the log gave %" PRIu64 " keys where its last version says that it has %" PRIu64,
                                      found, keys);
}

int quire_cec_foreign(quire_cec *cec, uint64_t version) {
    uint64_t keys;
    writing_forget(cec);
    QUIRE_TRY(keys_count(cec, &keys));
    versions_cut(cec, 0);
    QUIRE_TRY(version_begin(cec, version));
    version_end(cec, keys, version);
    return QUIRE_OK;
}

int quire_cec_restored(quire_cec *cec, uint64_t version) {
    writing_forget(cec);
    size_t count = cec->version_count;
    while (count > 0 && cec->versions[count - 1].version > version) {
        count--;
    }
    if (count == 0 || cec->versions[count - 1].version != version ||
        cec->versions[count - 1].since < cec->versions[0].version) {
        return quire_fail(QUIRE_E_NOTFOUND,
                          "version %" PRIu64 " of the log is not known any more: load it from its files", version);
    }
    versions_cut(cec, count);
    cec->epoch = 0;
    cec->applied = 0;
    cec->missed = false;
    cec->inherited = true;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ the object */

int quire_cec_create(quire_arena *arena, const quire_cec_policy *policy, quire_cec **cec) {
    if (!(policy->extent_target > 1) || policy->extent_target > 1e9) {
        return quire_fail(
            QUIRE_E_INVALID,
            "a target of %g times the live keys cannot be held: the stretch of log that holds every key is "
            "never shorter than their number; give more than 1, such as 2",
            policy->extent_target);
    }
    quire_cec *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return no_memory("the head");
    }
    made->arena = arena;
    made->policy = *policy;
    *cec = made;
    return QUIRE_OK;
}

void quire_cec_destroy(quire_cec *cec) {
    writing_forget(cec);
    versions_cut(cec, 0);
    while (cec->family_count > 0) {
        family_remove(cec, &cec->families[cec->family_count - 1]);
    }
    free(cec->families);
    free(cec->versions);
    free(cec->undo);
    free(cec);
}
