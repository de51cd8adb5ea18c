/* pages.h -- what changed between two states of an arena, as pages; and those pages put into another arena.
 *
 * Purpose     A commit of the `pages` mode writes these, a restart puts them on top of an image or of each other, and has rebuilt nothing: every
 *             reference inside a page is a page id. The cost follows the pages that changed (quire_view_changed).
 *
 * Layout      A payload (the raw bytes of one frame) is a row of records. Numbers are little endian.
 *             u8 1  begin   parent point (16 identity, u32 epoch), the same state's point in the writer (20; another one where the writer
 *                           loaded that state, so that a base it writes of it fits, too), own point (20), u32 page_bytes, u32 sets, and for each set
 *                           u16 bytes, name: sets that are not among them are gone. First in the first payload, and only there
 *             u8 2  set     u8 0: changes, 1: all its pages; u8 kind, u16 bytes, name, twice (pages, directory) u32 page_limit,
 *                           u32 free_head, u32 page_count: what follows is this set's. First in every other payload, with u8 0
 *             u8 3  page    u32 id, page_bytes of it
 *             u8 4  free    u32 id, u32 next: the id is free, and this comes after it in the list
 *
 * Invariants  I1 put on the state that the parent point names, the records give the state that the own point names, page for page.
 *             I2 they are refused on any other state.
 * Ownership   The sink's bytes live until it returns.
 * Threads     The writer's.
 * Errors      QUIRE_E_MISMATCH for a payload on a state that it does not start from, QUIRE_E_CORRUPT for one that makes no sense. The
 *             arena may hold a part of it then: close it.
 */
#ifndef QUIRE_CHECKPOINT_PAGES_H
#define QUIRE_CHECKPOINT_PAGES_H

#include "delta.h"

#define QUIRE_PAGES_PAYLOAD_BYTES (1u << 20) /* a payload is handed on once it is longer */

/* From the epoch since (of a commit of this arena, its origin's, or 0 for the empty state) to the state being written. */
int quire_pages_write(quire_arena *arena, uint32_t since, quire_delta_sink sink, void *context);
/* About how many bytes that would take. */
int quire_pages_bytes(quire_arena *arena, uint32_t since, uint64_t *bytes);
/* Payloads of one file, in order, to an arena that is where they start from. Commit it after the last one. */
int quire_pages_apply(quire_arena *arena, const uint8_t *payload, size_t count);

#endif
