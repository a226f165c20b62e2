/* Ringfold's hints: how a host's transport agent tells every process on it how to split a flow over its paths.
 *
 * The agent writes one file; everybody else maps it read-only and reads it without system calls, locks or waiting. This
 * header is the whole contract, for C99 and C++11 and later (GCC or Clang, little-endian, 64 bit): the layout, and a
 * reader. docs/reference/hints.md says the same in words, with test vectors. ringfold_agent.h registers flows, and
 * reads their hints with what is here.
 *
 * Words. A *slot* belongs to one flow (a source, a destination, and the paths between them). Its *generation* changes
 * whenever the slot gets another owner; who registers a flow is told both, and a hint of another generation is not for
 * him. A *share* is the part of the bytes that a path should carry: 0 is nothing and 65535 is everything. *Local* means
 * that there is no advice: split by what you measure yourself.
 *
 * What a reader relies on:
 *   1. Up to four paths, a hint is one aligned 64-bit word: it is never torn, whatever happens to the agent.
 *   2. For five to sixteen paths the word says so, and the shares stand in the slot under a sequence number. A reader
 *      that cannot get an even and unchanged number within a few tries keeps what it had. It never waits.
 *   3. The file keeps its inode and never shrinks, so a mapping stays good across restarts of the agent. A restarted
 *      agent makes every word invalid before it says that it is there.
 *   4. The first 16 bytes mean the same in every version. Any other version number means local.
 *   5. An agent that is not heard (the heartbeat is old) means local. Check that once per turn, not once per hint.
 *
 * How to read:
 *     struct ringfold_hints_map map;
 *     if (ringfold_hints_open("/run/ringfold/hints", &map) != RINGFOLD_HINTS_OK) ... local;
 *     once per turn:  fresh = ringfold_hints_look(&map, now) == RINGFOLD_HINTS_OK;
 *     per segment:    if (fresh) got = ringfold_hint_read(map.base, slot, generation, &hint);
 *                     got: RINGFOLD_HINT_LOCAL, RINGFOLD_HINT_READ, or RINGFOLD_HINT_BUSY (`hint` is what it was)
 *     after a read:   ringfold_hint_flags(map.base, slot) & RINGFOLD_HINT_FIXED: keep to the shares over the whole
 *                     transfer; else they are where to begin
 */
#ifndef RINGFOLD_HINTS_H
#define RINGFOLD_HINTS_H

/* The file needs POSIX.1-2008. With -std=c99 include this header first, or say -D_POSIX_C_SOURCE=200809L. */
#if !defined(__cplusplus) && !defined(_GNU_SOURCE) && !defined(_DEFAULT_SOURCE) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__cplusplus)
#define RINGFOLD_HINTS_ASSERT(condition, why) static_assert(condition, why)
extern "C" {
#elif __STDC_VERSION__ >= 201112L
#define RINGFOLD_HINTS_ASSERT(condition, why) _Static_assert(condition, why)
#else /* an array of -1 elements does not compile */
#define RINGFOLD_HINTS_ASSERT(condition, why) extern char ringfold_hints_assert[(condition) ? 1 : -1]
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "hints are little-endian"
#endif

#define RINGFOLD_HINTS_MAGIC UINT64_C(0x73746e6948466952) /* the bytes "RiFHints" */
#define RINGFOLD_HINTS_ABI 1u
#define RINGFOLD_HINTS_HEADER_BYTES 4096u
#define RINGFOLD_HINTS_SLOT_BYTES 64u
#define RINGFOLD_HINTS_SLOTS 4096u
#define RINGFOLD_HINTS_FILE_BYTES (RINGFOLD_HINTS_HEADER_BYTES + RINGFOLD_HINTS_SLOTS * RINGFOLD_HINTS_SLOT_BYTES)
#define RINGFOLD_HINTS_MOST_PATHS 16u
#define RINGFOLD_HINTS_MOST_TRIES 64

#define RINGFOLD_PATH_SOUT 0u /* the two classic paths */
#define RINGFOLD_PATH_SUP 1u
#define RINGFOLD_SHARE_ALL 65535u

struct ringfold_hints_header {
  uint64_t magic;
  uint32_t abi;          /* 0 while the file is being laid out */
  uint32_t header_bytes; /* where the slots begin */
  uint32_t slot_bytes;
  uint32_t slots;
  uint64_t file_bytes;
  uint64_t generation;     /* counts the lives of the agent; never goes back */
  uint64_t writer_pid;     /* 0: the agent has ended */
  uint64_t heartbeat_ns;   /* CLOCK_MONOTONIC; 0: the agent has ended, or is not ready */
  uint64_t stale_after_ns; /* a heartbeat this old means local */
};

/* The word of a slot:
 *   bits  0..35  shares. Two paths: bits 0..15, the share of path 1 (SUP) of 65535. Three or four: 12 bits each for the
 *                paths 1, 2 and 3, of 4095. Path 0 has the rest. Else 0.
 *   bits 36..39  backpressure: bit 36 + p is set when path p must not be used at all. Its share is 0 then, unless
 *                all are.
 *   bits 40..42  form: 2, 3 or 4 is the number of paths; 1: five or more, in `wide`.
 *   bit  43      valid
 *   bits 44..63  the slot's generation, never 0 */
#define RINGFOLD_WORD_SHARE_BITS 36
#define RINGFOLD_WORD_NARROW_BITS 12
#define RINGFOLD_WORD_NARROW_ALL 4095u
#define RINGFOLD_WORD_BACKPRESSURE_AT 36
#define RINGFOLD_WORD_FORM_AT 40
#define RINGFOLD_WORD_FORM_WIDE 1u
#define RINGFOLD_WORD_VALID (UINT64_C(1) << 43)
#define RINGFOLD_WORD_GENERATION_AT 44
#define RINGFOLD_WORD_GENERATION_MASK 0xfffffu

#define RINGFOLD_HINT_FIXED                                                                 \
  1u /* the shares bind: keep to them over the whole transfer. Else they are where to begin \
      */

struct ringfold_hint_slot {
  uint64_t word;
  uint32_t sequence;   /* of `wide`: odd while it is being written */
  uint32_t flags;      /* RINGFOLD_HINT_FIXED; written before the word, so read it after the word */
  uint64_t wide[5];    /* [0]: generation << 44 | paths << 16 | backpressure by path; [1..4]: 16 shares of 16 bits */
  uint64_t written_ns; /* CLOCK_MONOTONIC of the last change, for people */
};

RINGFOLD_HINTS_ASSERT(sizeof(struct ringfold_hints_header) == 64, "the header is one cache line");
RINGFOLD_HINTS_ASSERT(offsetof(struct ringfold_hints_header, abi) == 8, "the first 16 bytes never change");
RINGFOLD_HINTS_ASSERT(offsetof(struct ringfold_hints_header, heartbeat_ns) == 48, "heartbeat");
RINGFOLD_HINTS_ASSERT(sizeof(struct ringfold_hint_slot) == RINGFOLD_HINTS_SLOT_BYTES, "a slot is one cache line");
RINGFOLD_HINTS_ASSERT(offsetof(struct ringfold_hint_slot, wide) == 16, "the shares of many paths");
RINGFOLD_HINTS_ASSERT(offsetof(struct ringfold_hint_slot, written_ns) == 56, "written_ns");
RINGFOLD_HINTS_ASSERT(RINGFOLD_HINTS_HEADER_BYTES % RINGFOLD_HINTS_SLOT_BYTES == 0, "slots are aligned");

/* What a look at the file found. Everything but OK means local. */
enum ringfold_hints_state {
  RINGFOLD_HINTS_OK = 0,
  RINGFOLD_HINTS_MISSING = 1,   /* no such file, or no right to read it */
  RINGFOLD_HINTS_FOREIGN = 2,   /* not a file of hints, or shorter than it says */
  RINGFOLD_HINTS_OTHER_ABI = 3, /* written for another version of this header */
  RINGFOLD_HINTS_STALE = 4      /* no agent, or one that is not heard */
};

enum ringfold_hint_result { RINGFOLD_HINT_LOCAL = 0, RINGFOLD_HINT_READ = 1, RINGFOLD_HINT_BUSY = 2 };

struct ringfold_hint {
  uint16_t shares[RINGFOLD_HINTS_MOST_PATHS]; /* of 65535, and 65535 together */
  uint16_t backpressure;                      /* bit p: path p must not be used */
  uint16_t paths;
};

/* A word's parts */

static inline uint32_t ringfold_word_generation(uint64_t word) {
  return (uint32_t)(word >> RINGFOLD_WORD_GENERATION_AT);
}
static inline uint32_t ringfold_word_form(uint64_t word) { return (uint32_t)(word >> RINGFOLD_WORD_FORM_AT) & 7u; }
static inline uint32_t ringfold_word_backpressure(uint64_t word) {
  return (uint32_t)(word >> RINGFOLD_WORD_BACKPRESSURE_AT) & 15u;
}
static inline int ringfold_word_is_for(uint64_t word, uint32_t generation) {
  return (word & RINGFOLD_WORD_VALID) != 0 && ringfold_word_generation(word) == generation;
}

/* The share of one path of a word with two to four paths, of 65535. */
static inline uint32_t ringfold_word_share(uint64_t word, uint32_t path) {
  const uint32_t form = ringfold_word_form(word);
  uint32_t rest = RINGFOLD_SHARE_ALL, share, each;
  if (form < 2 || form > 4 || path >= form) return 0;
  if (form == 2) return path == 1 ? (uint32_t)(word & 0xffffu) : RINGFOLD_SHARE_ALL - (uint32_t)(word & 0xffffu);
  for (each = 1; each < form; ++each) {
    share = (uint32_t)(word >> ((each - 1) * RINGFOLD_WORD_NARROW_BITS)) & RINGFOLD_WORD_NARROW_ALL;
    share = (share * RINGFOLD_SHARE_ALL + RINGFOLD_WORD_NARROW_ALL / 2) / RINGFOLD_WORD_NARROW_ALL;
    if (share > rest) share = rest;
    if (each == path) return share;
    rest -= share;
  }
  return rest;
}

/* The classic multiplier of the SUP path: 0, 1 and 2 are 0, 50 and 66.7 %. */
static inline uint32_t ringfold_share_of_sup_bw(uint32_t sup_bw) {
  const uint64_t parts = (uint64_t)sup_bw + 1;
  return (uint32_t)(((uint64_t)sup_bw * RINGFOLD_SHARE_ALL * 2 + parts) / (parts * 2));
}

/* Reading. `base` is the start of the mapping. */

static inline const struct ringfold_hint_slot* ringfold_hint_slot_at(const void* base, uint32_t slot) {
  const char* slots = (const char*)base + RINGFOLD_HINTS_HEADER_BYTES;
  return (const struct ringfold_hint_slot*)(const void*)(slots + (size_t)slot * RINGFOLD_HINTS_SLOT_BYTES);
}

/* The word if it is valid and of this generation; else 0, which is local. `slot` must be below RINGFOLD_HINTS_SLOTS. */
static inline uint64_t ringfold_hint_word(const void* base, uint32_t slot, uint32_t generation) {
  const uint64_t word = __atomic_load_n(&ringfold_hint_slot_at(base, slot)->word, __ATOMIC_ACQUIRE);
  return ringfold_word_is_for(word, generation) ? word : 0;
}

static inline enum ringfold_hint_result ringfold_hint_read_wide(const struct ringfold_hint_slot* slot,
                                                                uint32_t generation, struct ringfold_hint* hint) {
  uint64_t copy[5];
  uint32_t before, after, at;
  int attempt;
  for (attempt = 0; attempt < RINGFOLD_HINTS_MOST_TRIES; ++attempt) {
    before = __atomic_load_n(&slot->sequence, __ATOMIC_ACQUIRE);
    if (before & 1u) continue;
    for (at = 0; at < 5; ++at) copy[at] = __atomic_load_n(&slot->wide[at], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    after = __atomic_load_n(&slot->sequence, __ATOMIC_RELAXED);
    if (before != after) continue;
    if ((uint32_t)(copy[0] >> RINGFOLD_WORD_GENERATION_AT) != generation) return RINGFOLD_HINT_LOCAL;
    hint->paths = (uint16_t)((copy[0] >> 16) & 0xffu);
    if (hint->paths > RINGFOLD_HINTS_MOST_PATHS) hint->paths = RINGFOLD_HINTS_MOST_PATHS;
    hint->backpressure = (uint16_t)copy[0];
    memcpy(hint->shares, &copy[1], sizeof hint->shares);
    return RINGFOLD_HINT_READ;
  }
  return RINGFOLD_HINT_BUSY;
}

/* Fills `hint`, or leaves it as it was (RINGFOLD_HINT_BUSY), or says that there is no advice for this owner. */
static inline enum ringfold_hint_result ringfold_hint_read(const void* base, uint32_t slot, uint32_t generation,
                                                           struct ringfold_hint* hint) {
  uint64_t word;
  uint32_t path, form;
  if (slot >= RINGFOLD_HINTS_SLOTS) return RINGFOLD_HINT_LOCAL;
  word = ringfold_hint_word(base, slot, generation);
  if (word == 0) return RINGFOLD_HINT_LOCAL;
  form = ringfold_word_form(word);
  if (form == RINGFOLD_WORD_FORM_WIDE)
    return ringfold_hint_read_wide(ringfold_hint_slot_at(base, slot), generation, hint);
  if (form < 2 || form > 4) return RINGFOLD_HINT_LOCAL;
  memset(hint->shares, 0, sizeof hint->shares);
  for (path = 0; path < form; ++path) hint->shares[path] = (uint16_t)ringfold_word_share(word, path);
  hint->backpressure = (uint16_t)ringfold_word_backpressure(word);
  hint->paths = (uint16_t)form;
  return RINGFOLD_HINT_READ;
}

/* RINGFOLD_HINT_FIXED, or 0: for the hint that was read just before this call. */
static inline uint32_t ringfold_hint_flags(const void* base, uint32_t slot) {
  if (slot >= RINGFOLD_HINTS_SLOTS) return 0;
  return __atomic_load_n(&ringfold_hint_slot_at(base, slot)->flags, __ATOMIC_RELAXED);
}

/* The file */

struct ringfold_hints_map {
  const void* base; /* 0: nothing is mapped */
  uint64_t device, inode;
};

static inline uint64_t ringfold_hints_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Whether the agent is there and speaks this version. `now_ns` is CLOCK_MONOTONIC. A heartbeat from the future is of
 * another boot, or of a container with a clock of its own: nothing is known, so it is stale. */
static inline enum ringfold_hints_state ringfold_hints_look(const struct ringfold_hints_map* map, uint64_t now_ns) {
  const struct ringfold_hints_header* header = (const struct ringfold_hints_header*)map->base;
  uint64_t beat, limit, age;
  if (header == 0) return RINGFOLD_HINTS_MISSING;
  if (__atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) != RINGFOLD_HINTS_MAGIC) return RINGFOLD_HINTS_FOREIGN;
  if (__atomic_load_n(&header->abi, __ATOMIC_ACQUIRE) != RINGFOLD_HINTS_ABI) return RINGFOLD_HINTS_OTHER_ABI;
  beat = __atomic_load_n(&header->heartbeat_ns, __ATOMIC_ACQUIRE);
  limit = __atomic_load_n(&header->stale_after_ns, __ATOMIC_RELAXED);
  age = now_ns > beat ? now_ns - beat : beat - now_ns;
  return beat == 0 || age > limit ? RINGFOLD_HINTS_STALE : RINGFOLD_HINTS_OK;
}

static inline void ringfold_hints_close(struct ringfold_hints_map* map) {
  if (map->base != 0) munmap((void*)(uintptr_t)map->base, RINGFOLD_HINTS_FILE_BYTES);
  map->base = 0;
}

/* Maps the file read-only and does not look at it: MISSING or FOREIGN if that cannot be done, else OK. For those who
 * guard the mapping before they look: a file that shrinks under its mapping makes a read a SIGBUS. */
static inline enum ringfold_hints_state ringfold_hints_map_file(const char* path, struct ringfold_hints_map* map) {
  struct stat about;
  void* base;
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  map->base = 0;
  if (fd < 0) return RINGFOLD_HINTS_MISSING;
  if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || (uint64_t)about.st_size < RINGFOLD_HINTS_FILE_BYTES) {
    close(fd);
    return RINGFOLD_HINTS_FOREIGN;
  }
  base = mmap(0, RINGFOLD_HINTS_FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (base == MAP_FAILED) return RINGFOLD_HINTS_MISSING;
  map->base = base;
  map->device = (uint64_t)about.st_dev;
  map->inode = (uint64_t)about.st_ino;
  return RINGFOLD_HINTS_OK;
}

/* Maps the file and looks at it. Only MISSING and FOREIGN leave it unmapped: a file of another version, or without an
 * agent, is worth looking at again. */
static inline enum ringfold_hints_state ringfold_hints_open(const char* path, struct ringfold_hints_map* map) {
  enum ringfold_hints_state state = ringfold_hints_map_file(path, map);
  if (state != RINGFOLD_HINTS_OK) return state;
  state = ringfold_hints_look(map, ringfold_hints_now());
  if (state == RINGFOLD_HINTS_FOREIGN) ringfold_hints_close(map);
  return state;
}

/* Whether `path` is still the file that is mapped. Worth asking now and then while the hints are stale: somebody may
 * have removed the file, and a new agent made another one. */
static inline int ringfold_hints_is_current(const char* path, const struct ringfold_hints_map* map) {
  struct stat about;
  if (map->base == 0 || stat(path, &about) != 0) return 0;
  return (uint64_t)about.st_dev == map->device && (uint64_t)about.st_ino == map->inode;
}

#if defined(__cplusplus)
}
#endif

#endif
