/* A transport and its host's agent, in C: register flows, report what is measured, and read how to split them.
 *
 * This header is all that a transport needs (an NCCL net plugin, a storage client): no Python, no msgpack, no library,
 * no thread. It is for C99 and C++11 and later (GCC or Clang, Linux, 64 bit, little-endian). ringfold_hints.h, which it
 * includes, has the layout of the hints; docs/reference/agent-socket.md has the bytes on the socket;
 * docs/guides/transport-plugin.md goes through a transport call by call, and examples/transport/ is one.
 *
 *     struct ringfold_agent agent;
 *     struct ringfold_agent_flow flow;
 *     struct ringfold_hint hint;
 *     ringfold_agent_open(&agent, 0, "my transport");            // succeeds with or without an agent
 *     ringfold_agent_flow_init(&flow, "10.0.0.1", "10.0.0.2");
 *     ringfold_agent_flow_add_path(&flow, "10.0.0.1", "10.0.0.2");
 *     ringfold_agent_flow_add_path(&flow, "10.1.0.1", "10.1.0.2");
 *     int id = ringfold_agent_register(&agent, &flow);           // from 0; below 0 is an error
 *     every few milliseconds:  ringfold_agent_poll(&agent, ringfold_hints_now());
 *     once per turn:           ringfold_agent_look(&agent, ringfold_hints_now());
 *     per request:             if (ringfold_agent_hint(&agent, id, &hint) == RINGFOLD_HINT_READ) ... hint.shares
 *                              else split by what you measure yourself
 *     now and then:            ringfold_agent_report(&agent, id, bytes_per_s, srtt_us, min_rtt_us);
 *     ringfold_agent_remove(&agent, id);
 *     ringfold_agent_close(&agent);
 *
 * What a caller relies on:
 *   1. No call blocks but `ringfold_agent_wait`, and none fails because of the agent. Without an agent, flows are
 *      *local*: split by what you measure.
 *   2. An agent may start, end, be killed or be replaced at any time. `poll` connects again and registers every flow
 *      again; from the end of a connection until then its flows are local. Flow numbers stay the same.
 *   3. `look` and `hint` make no system call while the agent is alive.
 *   4. A table that is truncated under its mapping does not end the process: see `ringfold_hints_guard`.
 *
 * Threads. A `struct ringfold_agent` is used by one thread at a time; a lock of yours or one agent per thread are both
 * fine. Different agents share nothing but the SIGBUS guard, which is safe for threads and has room for
 * RINGFOLD_GUARD_RANGES of them; an agent beyond that finds no hints (RINGFOLD_HINTS_MISSING), and its flows are local.
 * The copy in a forked child does nothing: it sends nothing and closes nothing of its parent's; the child opens its
 * own. `close` ends the connection for all copies. If the parent is killed, its flows stay until the last copy is
 * closed.
 *
 * The parts: the *core* decides and has no sockets and no clock (bytes and times in, bytes out), so that it is tested
 * in a simulation, and fits into an event loop of yours. The *shell* below it has the socket and the mapping. */
#ifndef RINGFOLD_AGENT_H
#define RINGFOLD_AGENT_H

/* With -std=c99 include this header first, or say -D_DEFAULT_SOURCE. */
#if !defined(__cplusplus) && !defined(_GNU_SOURCE) && !defined(_DEFAULT_SOURCE) && !defined(_POSIX_C_SOURCE)
#define _DEFAULT_SOURCE
#endif

#include "ringfold_hints.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define RINGFOLD_AGENT_MARK 0xc1u
#define RINGFOLD_AGENT_VERSION 1u
#define RINGFOLD_AGENT_MAX_FLOWS 0xfffffe
#define RINGFOLD_AGENT_NAME_BYTES 64
#define RINGFOLD_AGENT_TEXT_BYTES 112
#define RINGFOLD_AGENT_HEAD_BYTES 16u /* of a body */
#define RINGFOLD_AGENT_FRAME_BYTES 5u /* u32 length, u8 kind */
#define RINGFOLD_AGENT_MAX_RESPONSE 512u
#define RINGFOLD_AGENT_MAX_QUEUED (16u << 20)
#define RINGFOLD_AGENT_MAX_QUEUED_REPORTS (64u << 10) /* more unsent bytes than this: reports are dropped */

#define RINGFOLD_AGENT_MS UINT64_C(1000000)
#define RINGFOLD_AGENT_RENEW_NS (1000 * RINGFOLD_AGENT_MS)   /* a flow is renewed this often, one after another */
#define RINGFOLD_AGENT_RETRY_NS (1000 * RINGFOLD_AGENT_MS)   /* a flow beyond a limit is registered again */
#define RINGFOLD_AGENT_SILENT_NS (10000 * RINGFOLD_AGENT_MS) /* an agent that does not respond for so long is left */
#define RINGFOLD_AGENT_LATE_NS \
  (RINGFOLD_AGENT_SILENT_NS / 2) /* a caller that polls less often is not the agent's fault */
#define RINGFOLD_AGENT_REMAP_NS (100 * RINGFOLD_AGENT_MS)
#define RINGFOLD_AGENT_MIN_RECONNECT_NS (50 * RINGFOLD_AGENT_MS)
#define RINGFOLD_AGENT_MAX_RECONNECT_NS (30000 * RINGFOLD_AGENT_MS)
#define RINGFOLD_AGENT_MIN_SERVED_NS (1000 * RINGFOLD_AGENT_MS)

enum ringfold_agent_type {
  RINGFOLD_AGENT_HELLO = 1,
  RINGFOLD_AGENT_REGISTER = 2,
  RINGFOLD_AGENT_RENEW = 3,
  RINGFOLD_AGENT_DEREGISTER = 4,
  RINGFOLD_AGENT_MEASURED = 5,
  RINGFOLD_AGENT_WELCOME = 129,
  RINGFOLD_AGENT_REGISTERED = 130,
  RINGFOLD_AGENT_DEREGISTERED = 131,
  RINGFOLD_AGENT_REFUSED = 132
};

/* What calls return below 0. */
enum ringfold_agent_error {
  RINGFOLD_AGENT_OK = 0,
  RINGFOLD_AGENT_INVALID = -1,   /* an address, a name, a number of paths or a flow number that is none */
  RINGFOLD_AGENT_NO_MEMORY = -2, /* or too many flows */
  RINGFOLD_AGENT_FORKED = -3     /* this agent belongs to the parent process */
};

/* The connection to the agent. */
enum ringfold_agent_state {
  RINGFOLD_AGENT_AWAY = 0,     /* there is none: all flows are local */
  RINGFOLD_AGENT_GREETING = 1, /* hello is sent */
  RINGFOLD_AGENT_SERVED = 2    /* the agent has welcomed this client */
};

/* A flow of this client. */
enum ringfold_flow_state {
  RINGFOLD_FLOW_NONE = 0,      /* not a flow */
  RINGFOLD_FLOW_WAITING = 1,   /* no agent */
  RINGFOLD_FLOW_REQUESTED = 2, /* the agent has not responded yet */
  RINGFOLD_FLOW_PLACED = 3,    /* its hints have a slot */
  RINGFOLD_FLOW_REFUSED = 4,   /* by this agent: an address that it does not accept */
  RINGFOLD_FLOW_OVER_LIMIT = 5 /* of the user or of the table: registered again later */
};

/* Why a request was refused. */
enum ringfold_refusal {
  RINGFOLD_REFUSAL_NONE = 0,
  RINGFOLD_REFUSAL_VERSION = 1,
  RINGFOLD_REFUSAL_INVALID = 2,
  RINGFOLD_REFUSAL_DUPLICATE = 3,
  RINGFOLD_REFUSAL_UNKNOWN = 4,
  RINGFOLD_REFUSAL_QUOTA = 5,
  RINGFOLD_REFUSAL_FULL = 6,
  RINGFOLD_REFUSAL_FORBIDDEN = 7
};

/* Flows */

struct ringfold_agent_address {
  uint8_t ip[16];          /* IPv4 as ::ffff:a.b.c.d */
  char interface_name[16]; /* of a link-local address, else empty */
};

struct ringfold_agent_path {
  struct ringfold_agent_address local, remote;
};

struct ringfold_agent_flow {
  struct ringfold_agent_address source, destination;
  char source_host[RINGFOLD_AGENT_NAME_BYTES]; /* for people; may be empty */
  char destination_host[RINGFOLD_AGENT_NAME_BYTES];
  uint32_t paths; /* 2 to 16 */
  struct ringfold_agent_path path[RINGFOLD_HINTS_MOST_PATHS];
};

RINGFOLD_HINTS_ASSERT(sizeof(struct ringfold_agent_path) == 64, "a path on the socket");
RINGFOLD_HINTS_ASSERT(offsetof(struct ringfold_agent_flow, paths) == 192, "the ends on the socket");

/* Copies text into a field, filled with zeros: 0, or RINGFOLD_AGENT_INVALID if it does not fit. */
static inline int ringfold_agent_text(char* field, size_t bytes, const char* text) {
  const size_t length = text == 0 ? 0 : strlen(text);
  memset(field, 0, bytes);
  if (length >= bytes) return RINGFOLD_AGENT_INVALID;
  if (length > 0) memcpy(field, text, length);
  return RINGFOLD_AGENT_OK;
}

/* From text: 10.0.0.1, 2001:db8::1, fe80::1%eth0. */
static inline int ringfold_agent_address(struct ringfold_agent_address* address, const char* text) {
  static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  char plain[INET6_ADDRSTRLEN];
  const char* percent = strchr(text, '%');
  const size_t length = percent == 0 ? strlen(text) : (size_t)(percent - text);
  memset(address, 0, sizeof *address);
  if (length >= sizeof plain) return RINGFOLD_AGENT_INVALID;
  memcpy(plain, text, length);
  plain[length] = 0;
  if (percent == 0 && inet_pton(AF_INET, plain, address->ip + 12) == 1) {
    memcpy(address->ip, mapped, sizeof mapped);
    return RINGFOLD_AGENT_OK;
  }
  if (inet_pton(AF_INET6, plain, address->ip) != 1) return RINGFOLD_AGENT_INVALID;
  if (percent == 0) return RINGFOLD_AGENT_OK;
  if (percent[1] == 0) return RINGFOLD_AGENT_INVALID;
  return ringfold_agent_text(address->interface_name, sizeof address->interface_name, percent + 1);
}

/* From a socket address: of AF_INET or AF_INET6, with its scope. */
static inline int ringfold_agent_sockaddr(struct ringfold_agent_address* address, const struct sockaddr* from) {
  struct sockaddr_in four;
  struct sockaddr_in6 six;
  char name[IF_NAMESIZE];
  memset(address, 0, sizeof *address);
  if (from->sa_family == AF_INET) {
    memcpy(&four, from, sizeof four);
    address->ip[10] = address->ip[11] = 0xff;
    memcpy(address->ip + 12, &four.sin_addr, 4);
    return RINGFOLD_AGENT_OK;
  }
  if (from->sa_family != AF_INET6) return RINGFOLD_AGENT_INVALID;
  memcpy(&six, from, sizeof six);
  memcpy(address->ip, &six.sin6_addr, 16);
  if (six.sin6_scope_id == 0) return RINGFOLD_AGENT_OK;
  if (if_indextoname(six.sin6_scope_id, name) == 0) return RINGFOLD_AGENT_INVALID;
  return ringfold_agent_text(address->interface_name, sizeof address->interface_name, name);
}

/* A flow without paths. `source` and `destination` name it; they are usually the addresses of its first path. */
static inline int ringfold_agent_flow_init(struct ringfold_agent_flow* flow, const char* source,
                                           const char* destination) {
  memset(flow, 0, sizeof *flow);
  if (ringfold_agent_address(&flow->source, source) != RINGFOLD_AGENT_OK) return RINGFOLD_AGENT_INVALID;
  return ringfold_agent_address(&flow->destination, destination);
}

static inline int ringfold_agent_flow_add_path(struct ringfold_agent_flow* flow, const char* local,
                                               const char* remote) {
  struct ringfold_agent_path* path;
  if (flow->paths >= RINGFOLD_HINTS_MOST_PATHS) return RINGFOLD_AGENT_INVALID;
  path = &flow->path[flow->paths];
  if (ringfold_agent_address(&path->local, local) != RINGFOLD_AGENT_OK) return RINGFOLD_AGENT_INVALID;
  if (ringfold_agent_address(&path->remote, remote) != RINGFOLD_AGENT_OK) return RINGFOLD_AGENT_INVALID;
  flow->paths += 1;
  return RINGFOLD_AGENT_OK;
}

/* The core: flows and bytes, without sockets and clocks. */

struct ringfold_agent_entry {
  struct ringfold_agent_flow flow;
  enum ringfold_flow_state state;
  uint64_t connection; /* its number on the socket, never used twice by one client */
  uint32_t request;    /* of the registration or renewal that is not answered; 0: none */
  uint32_t salt;       /* makes the next request of this entry another one */
  uint32_t slot, generation;
  enum ringfold_refusal refusal;
  char text[RINGFOLD_AGENT_TEXT_BYTES]; /* of the refusal */
  uint32_t requests_left;               /* until the hint is read again */
  enum ringfold_hint_result last_result;
  struct ringfold_hint last_hint;
};

struct ringfold_agent_core {
  enum ringfold_agent_state state;
  struct ringfold_agent_entry* entries;
  uint32_t count, capacity; /* of entries; a freed one is used again */
  uint32_t first_free;      /* no entry below it is free */
  uint64_t last_connection;
  uint64_t unanswered;  /* requests */
  uint64_t response_ns; /* the last response, or the first request after none were unanswered */
  uint64_t renew_ns, retry_ns, tick_ns;
  uint32_t next_renewed, next_retried;
  uint64_t table_generation;  /* counts the agent's lives; 0: no agent */
  uint32_t requests_per_hint; /* as the agent advises; 0: no advice */
  uint8_t* out;               /* bytes to send: from out_begin to out_end */
  size_t out_begin, out_end, out_capacity;
  uint8_t in[RINGFOLD_AGENT_MAX_RESPONSE]; /* a response that has not arrived whole */
  size_t in_bytes;
  int is_broken;                 /* the connection must be closed: no memory, or the agent does not read */
  enum ringfold_refusal refusal; /* of the connection itself */
  char text[RINGFOLD_AGENT_TEXT_BYTES];
  char name[RINGFOLD_AGENT_NAME_BYTES];
  uint64_t registered, refused, dropped_reports; /* counts */
};

static inline void ringfold_agent_put32(uint8_t* at, uint32_t value) { memcpy(at, &value, 4); }
static inline void ringfold_agent_put64(uint8_t* at, uint64_t value) { memcpy(at, &value, 8); }
static inline uint32_t ringfold_agent_get32(const uint8_t* at) {
  uint32_t value;
  memcpy(&value, at, 4);
  return value;
}
static inline uint64_t ringfold_agent_get64(const uint8_t* at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}

static inline void ringfold_agent_core_init(struct ringfold_agent_core* core, const char* name) {
  size_t length = name == 0 ? 0 : strlen(name);
  memset(core, 0, sizeof *core);
  if (length >= sizeof core->name) { /* cut between two characters */
    length = sizeof core->name - 1;
    while (length > 0 && ((unsigned char)name[length] & 0xc0u) == 0x80u) length -= 1;
  }
  if (length > 0) memcpy(core->name, name, length);
}

static inline void ringfold_agent_core_free(struct ringfold_agent_core* core) {
  free(core->entries);
  free(core->out);
  memset(core, 0, sizeof *core);
}

/* Room for a frame with a body of so many bytes; its head is written. 0: the connection is broken. */
static inline uint8_t* ringfold_agent_core_frame(struct ringfold_agent_core* core, enum ringfold_agent_type type,
                                                 uint32_t count, uint32_t request, uint64_t connection,
                                                 size_t rest_bytes) {
  const size_t body = RINGFOLD_AGENT_HEAD_BYTES + rest_bytes, bytes = RINGFOLD_AGENT_FRAME_BYTES + body;
  size_t capacity = core->out_capacity == 0 ? 4096 : core->out_capacity;
  uint8_t* at;
  if (core->out_begin > 0 && core->out_capacity - core->out_end < bytes) {
    memmove(core->out, core->out + core->out_begin, core->out_end - core->out_begin);
    core->out_end -= core->out_begin;
    core->out_begin = 0;
  }
  while (capacity - core->out_end < bytes) capacity *= 2;
  if (capacity > RINGFOLD_AGENT_MAX_QUEUED) {
    core->is_broken = 1;
    return 0;
  }
  if (capacity != core->out_capacity) {
    at = (uint8_t*)realloc(core->out, capacity);
    if (at == 0) {
      core->is_broken = 1;
      return 0;
    }
    core->out = at;
    core->out_capacity = capacity;
  }
  at = core->out + core->out_end;
  core->out_end += bytes;
  memset(at, 0, bytes);
  ringfold_agent_put32(at, (uint32_t)(1 + body));
  at += RINGFOLD_AGENT_FRAME_BYTES;
  at[0] = RINGFOLD_AGENT_MARK;
  at[1] = RINGFOLD_AGENT_VERSION;
  at[2] = (uint8_t)type;
  at[3] = (uint8_t)count;
  ringfold_agent_put32(at + 4, request);
  ringfold_agent_put64(at + 8, connection);
  return at + RINGFOLD_AGENT_HEAD_BYTES;
}

/* The number of this entry's next request: its index is in the low 24 bits, from 1. */
static inline uint32_t ringfold_agent_core_request(struct ringfold_agent_core* core, struct ringfold_agent_entry* entry,
                                                   uint64_t now_ns) {
  entry->salt += 1;
  if (core->unanswered == 0) core->response_ns = now_ns;
  core->unanswered += 1;
  return (entry->salt & 0xffu) << 24 | ((uint32_t)(entry - core->entries) + 1);
}

static inline void ringfold_agent_core_send_register(struct ringfold_agent_core* core,
                                                     struct ringfold_agent_entry* entry, uint64_t now_ns) {
  const struct ringfold_agent_flow* flow = &entry->flow;
  const size_t ends = offsetof(struct ringfold_agent_flow, paths);
  uint8_t* rest;
  entry->state = RINGFOLD_FLOW_REQUESTED;
  entry->request = ringfold_agent_core_request(core, entry, now_ns);
  rest = ringfold_agent_core_frame(core, RINGFOLD_AGENT_REGISTER, flow->paths, entry->request, entry->connection,
                                   ends + flow->paths * sizeof flow->path[0]);
  if (rest == 0) return;
  memcpy(rest, flow, ends);
  memcpy(rest + ends, flow->path, flow->paths * sizeof flow->path[0]);
}

/* A connection was opened: send the hello, and register all flows. */
static inline void ringfold_agent_core_connected(struct ringfold_agent_core* core, uint64_t now_ns) {
  uint8_t* rest;
  uint32_t each;
  core->state = RINGFOLD_AGENT_GREETING;
  core->refusal = RINGFOLD_REFUSAL_NONE;
  core->text[0] = 0;
  core->unanswered = 1; /* the hello */
  core->response_ns = now_ns;
  core->renew_ns = core->retry_ns = core->tick_ns = now_ns;
  rest = ringfold_agent_core_frame(core, RINGFOLD_AGENT_HELLO, 0, 0, 0, sizeof core->name);
  if (rest != 0) memcpy(rest, core->name, sizeof core->name);
  for (each = 0; each < core->count; ++each) {
    if (core->entries[each].state != RINGFOLD_FLOW_NONE)
      ringfold_agent_core_send_register(core, &core->entries[each], now_ns);
  }
}

/* The connection has ended: no flow has a place any more, and nothing that it would have answered is expected. */
static inline void ringfold_agent_core_disconnected(struct ringfold_agent_core* core) {
  uint32_t each;
  core->state = RINGFOLD_AGENT_AWAY;
  core->table_generation = core->unanswered = 0;
  core->out_begin = core->out_end = core->in_bytes = 0;
  core->is_broken = 0;
  for (each = 0; each < core->count; ++each) {
    struct ringfold_agent_entry* entry = &core->entries[each];
    if (entry->state == RINGFOLD_FLOW_NONE) continue;
    entry->state = RINGFOLD_FLOW_WAITING;
    entry->request = entry->requests_left = 0;
  }
}

static inline struct ringfold_agent_entry* ringfold_agent_core_entry(const struct ringfold_agent_core* core, int id) {
  if (id < 0 || (uint32_t)id >= core->count || core->entries[id].state == RINGFOLD_FLOW_NONE) return 0;
  return &core->entries[id];
}

/* A new flow: its number, from 0; or an error. */
static inline int ringfold_agent_core_add(struct ringfold_agent_core* core, const struct ringfold_agent_flow* flow,
                                          uint64_t now_ns) {
  struct ringfold_agent_entry* entry;
  uint32_t index = core->first_free, capacity;
  if (flow->paths < 2 || flow->paths > RINGFOLD_HINTS_MOST_PATHS) return RINGFOLD_AGENT_INVALID;
  while (index < core->count && core->entries[index].state != RINGFOLD_FLOW_NONE) index += 1;
  if (index >= RINGFOLD_AGENT_MAX_FLOWS) return RINGFOLD_AGENT_NO_MEMORY;
  if (index == core->capacity) {
    capacity = core->capacity == 0 ? 8 : core->capacity * 2;
    entry = (struct ringfold_agent_entry*)realloc(core->entries, capacity * sizeof *entry);
    if (entry == 0) return RINGFOLD_AGENT_NO_MEMORY;
    memset(entry + core->capacity, 0, (capacity - core->capacity) * sizeof *entry);
    core->entries = entry;
    core->capacity = capacity;
  }
  if (index == core->count) core->count += 1;
  core->first_free = index + 1;
  entry = &core->entries[index];
  entry->flow = *flow;
  entry->state = RINGFOLD_FLOW_WAITING;
  core->last_connection += 1;
  entry->connection = core->last_connection << 24 | index;
  entry->request = entry->requests_left = 0;
  entry->refusal = RINGFOLD_REFUSAL_NONE;
  entry->text[0] = 0;
  if (core->state != RINGFOLD_AGENT_AWAY) ringfold_agent_core_send_register(core, entry, now_ns);
  return (int)index;
}

/* The flow has ended. A response to an earlier request for it is ignored: its number is never used again. */
static inline int ringfold_agent_core_remove(struct ringfold_agent_core* core, int id, uint64_t now_ns) {
  struct ringfold_agent_entry* entry = ringfold_agent_core_entry(core, id);
  if (entry == 0) return RINGFOLD_AGENT_INVALID;
  if (entry->state == RINGFOLD_FLOW_REQUESTED || entry->state == RINGFOLD_FLOW_PLACED) {
    const uint32_t request = ringfold_agent_core_request(core, entry, now_ns);
    (void)ringfold_agent_core_frame(core, RINGFOLD_AGENT_DEREGISTER, 0, request, entry->connection, 0);
  }
  entry->state = RINGFOLD_FLOW_NONE;
  entry->request = 0;
  if ((uint32_t)id < core->first_free) core->first_free = (uint32_t)id;
  return RINGFOLD_AGENT_OK;
}

/* Where are the flow's hints now? The response sets its place again. No effect while it has none. */
static inline int ringfold_agent_core_renew(struct ringfold_agent_core* core, int id, uint64_t now_ns) {
  struct ringfold_agent_entry* entry = ringfold_agent_core_entry(core, id);
  if (entry == 0) return RINGFOLD_AGENT_INVALID;
  if (entry->state != RINGFOLD_FLOW_PLACED || entry->request != 0) return RINGFOLD_AGENT_OK;
  entry->request = ringfold_agent_core_request(core, entry, now_ns);
  (void)ringfold_agent_core_frame(core, RINGFOLD_AGENT_RENEW, 0, entry->request, entry->connection, 0);
  return RINGFOLD_AGENT_OK;
}

/* What was measured on each path: bytes acknowledged over busy time (0: nothing was sent), and the smoothed and lowest
 * RTT (0 or no array: not known). There is no response. No effect while the flow has no place. */
static inline int ringfold_agent_core_report(struct ringfold_agent_core* core, int id, const uint64_t* bytes_per_s,
                                             const uint32_t* srtt_us, const uint32_t* min_rtt_us) {
  struct ringfold_agent_entry* entry = ringfold_agent_core_entry(core, id);
  uint8_t* rest;
  uint32_t path;
  if (entry == 0) return RINGFOLD_AGENT_INVALID;
  if (entry->state != RINGFOLD_FLOW_PLACED) return RINGFOLD_AGENT_OK;
  if (core->out_end - core->out_begin > RINGFOLD_AGENT_MAX_QUEUED_REPORTS) {
    core->dropped_reports += 1;
    return RINGFOLD_AGENT_OK;
  }
  rest = ringfold_agent_core_frame(core, RINGFOLD_AGENT_MEASURED, entry->flow.paths, 0, entry->connection,
                                   (size_t)entry->flow.paths * 16);
  for (path = 0; rest != 0 && path < entry->flow.paths; ++path, rest += 16) {
    ringfold_agent_put64(rest, bytes_per_s[path]);
    ringfold_agent_put32(rest + 8, srtt_us == 0 ? 0 : srtt_us[path]);
    ringfold_agent_put32(rest + 12, min_rtt_us == 0 ? 0 : min_rtt_us[path]);
  }
  return RINGFOLD_AGENT_OK;
}

/* What is due by time: renewals, and flows beyond a limit, each in turn. Broken: the agent has not responded for too
 * long. After a long time without ticks that counts from now: what was requested meanwhile has not been sent yet. */
static inline void ringfold_agent_core_tick(struct ringfold_agent_core* core, uint64_t now_ns) {
  uint32_t step;
  if (core->state == RINGFOLD_AGENT_AWAY) return;
  if (now_ns > core->tick_ns && now_ns - core->tick_ns > RINGFOLD_AGENT_LATE_NS) core->response_ns = now_ns;
  core->tick_ns = now_ns;
  if (core->unanswered > 0 && now_ns > core->response_ns && now_ns - core->response_ns > RINGFOLD_AGENT_SILENT_NS)
    core->is_broken = 1;
  if (core->state != RINGFOLD_AGENT_SERVED || core->count == 0) return;
  if (now_ns >= core->retry_ns + RINGFOLD_AGENT_RETRY_NS) {
    core->retry_ns = now_ns;
    for (step = 0; step < core->count; ++step) {
      core->next_retried = (core->next_retried + 1) % core->count;
      if (core->entries[core->next_retried].state != RINGFOLD_FLOW_OVER_LIMIT) continue;
      ringfold_agent_core_send_register(core, &core->entries[core->next_retried], now_ns);
      break;
    }
  }
  if (now_ns >= core->renew_ns + RINGFOLD_AGENT_RENEW_NS) {
    core->renew_ns = now_ns;
    for (step = 0; step < core->count; ++step) {
      core->next_renewed = (core->next_renewed + 1) % core->count;
      if (core->entries[core->next_renewed].state != RINGFOLD_FLOW_PLACED) continue;
      (void)ringfold_agent_core_renew(core, (int)core->next_renewed, now_ns);
      break;
    }
  }
}

static inline void ringfold_agent_core_refused(struct ringfold_agent_core* core, uint32_t kind, uint32_t request,
                                               const uint8_t* text, uint64_t now_ns) {
  const enum ringfold_refusal why =
      kind > RINGFOLD_REFUSAL_FORBIDDEN ? RINGFOLD_REFUSAL_INVALID : (enum ringfold_refusal)kind;
  struct ringfold_agent_entry* entry;
  core->refused += 1;
  if (request == 0) {
    core->refusal = why;
    memcpy(core->text, text, sizeof core->text);
    core->text[sizeof core->text - 1] = 0;
    return;
  }
  entry = ringfold_agent_core_entry(core, (int)(request & 0xffffffu) - 1);
  if (entry == 0 || entry->request != request) return; /* of a flow that has ended */
  entry->request = 0;
  if (entry->state == RINGFOLD_FLOW_PLACED && why == RINGFOLD_REFUSAL_UNKNOWN) { /* a renewal */
    ringfold_agent_core_send_register(core, entry, now_ns);
    return;
  }
  entry->refusal = why;
  memcpy(entry->text, text, sizeof entry->text);
  entry->text[sizeof entry->text - 1] = 0;
  entry->state =
      why == RINGFOLD_REFUSAL_QUOTA || why == RINGFOLD_REFUSAL_FULL ? RINGFOLD_FLOW_OVER_LIMIT : RINGFOLD_FLOW_REFUSED;
}

/* One response, without its frame: 0, or -1 if it is none. */
static inline int ringfold_agent_core_response(struct ringfold_agent_core* core, const uint8_t* body, size_t bytes,
                                               uint64_t now_ns) {
  struct ringfold_agent_entry* entry;
  const uint8_t* rest = body + RINGFOLD_AGENT_HEAD_BYTES;
  uint64_t connection;
  uint32_t request;
  if (bytes < RINGFOLD_AGENT_HEAD_BYTES || body[0] != RINGFOLD_AGENT_MARK || body[1] != RINGFOLD_AGENT_VERSION)
    return -1; /* another version, or an agent that only knows msgpack */
  bytes -= RINGFOLD_AGENT_HEAD_BYTES;
  request = ringfold_agent_get32(body + 4);
  connection = ringfold_agent_get64(body + 8);
  core->response_ns = now_ns;
  if (core->unanswered > 0) core->unanswered -= 1;
  switch (body[2]) {
    case RINGFOLD_AGENT_WELCOME:
      if (bytes != 0 || core->state != RINGFOLD_AGENT_GREETING) return -1;
      core->state = RINGFOLD_AGENT_SERVED;
      core->table_generation = connection;
      core->requests_per_hint = request;
      return 0;
    case RINGFOLD_AGENT_REGISTERED:
      if (bytes != 8) return -1;
      entry = ringfold_agent_core_entry(core, (int)(connection & 0xffffffu));
      if (entry == 0 || entry->connection != connection || entry->request != request) return 0;
      if (entry->state == RINGFOLD_FLOW_REQUESTED) core->registered += 1;
      entry->state = RINGFOLD_FLOW_PLACED;
      entry->request = 0;
      entry->refusal = RINGFOLD_REFUSAL_NONE;
      entry->slot = ringfold_agent_get32(rest);
      entry->generation = ringfold_agent_get32(rest + 4);
      return 0;
    case RINGFOLD_AGENT_DEREGISTERED:
      return bytes == 0 ? 0 : -1;
    case RINGFOLD_AGENT_REFUSED:
      if (bytes != RINGFOLD_AGENT_TEXT_BYTES) return -1;
      ringfold_agent_core_refused(core, body[3], request, rest, now_ns);
      return 0;
    default:
      return -1;
  }
}

/* Bytes from the agent, cut anywhere: 0, or -1 if they are not its responses: close the connection then. */
static inline int ringfold_agent_core_receive(struct ringfold_agent_core* core, const void* bytes, size_t count,
                                              uint64_t now_ns) {
  const uint8_t* from = (const uint8_t*)bytes;
  while (count > 0) {
    size_t wanted = RINGFOLD_AGENT_FRAME_BYTES, part;
    if (core->in_bytes >= RINGFOLD_AGENT_FRAME_BYTES) wanted = 4 + ringfold_agent_get32(core->in);
    part = wanted - core->in_bytes < count ? wanted - core->in_bytes : count;
    memcpy(core->in + core->in_bytes, from, part);
    core->in_bytes += part;
    from += part;
    count -= part;
    if (core->in_bytes < RINGFOLD_AGENT_FRAME_BYTES) return 0;
    wanted = ringfold_agent_get32(core->in);
    /* A length that counts the kind at least, and fits; and the kind of a message. */
    if (wanted < 1 + RINGFOLD_AGENT_HEAD_BYTES || wanted > RINGFOLD_AGENT_MAX_RESPONSE - 4 || core->in[4] != 0)
      return -1;
    if (core->in_bytes < 4 + wanted) continue;
    core->in_bytes = 0;
    if (ringfold_agent_core_response(core, core->in + RINGFOLD_AGENT_FRAME_BYTES, wanted - 1, now_ns) != 0) return -1;
  }
  return 0;
}

/* The guard: a read of a mapping whose file was truncated is a SIGBUS. A handler puts zeros in place of the mapping (of
 * guarded ones and no others), the hints become local, and the file is mapped again when it is whole. Other SIGBUS
 * go to the handler that was there before. Install handlers of your own before the first agent is opened, or pass on
 * what is not yours; do not block SIGBUS. One guard per program or shared library that includes this header. */

#if defined(MAP_ANONYMOUS) && defined(SA_ONSTACK)
#define RINGFOLD_AGENT_ANONYMOUS MAP_ANONYMOUS
#define RINGFOLD_AGENT_ONSTACK SA_ONSTACK
#else /* _POSIX_C_SOURCE alone hides them; the numbers are those of x86-64 and aarch64 */
#define RINGFOLD_AGENT_ANONYMOUS 0x20
#define RINGFOLD_AGENT_ONSTACK 0x08000000
#endif

#define RINGFOLD_GUARD_RANGES 1024 /* open agents; 8 KB */
#define RINGFOLD_GUARD_SHARED __attribute__((weak, visibility("hidden")))

struct ringfold_guard {
  uintptr_t base[RINGFOLD_GUARD_RANGES]; /* 0: free */
  char lock;
  int is_installed;
  struct sigaction before;
};

RINGFOLD_GUARD_SHARED struct ringfold_guard ringfold_guard_v2;

static inline void ringfold_guard_on_bus_error(int number, siginfo_t* about, void* context) {
  const int kept = errno;
  const uintptr_t at = (uintptr_t)about->si_addr;
  struct ringfold_guard* guard = &ringfold_guard_v2;
  int range;
  for (range = 0; range < RINGFOLD_GUARD_RANGES && about->si_code > 0; ++range) { /* one that was sent has no address */
    const uintptr_t base = __atomic_load_n(&guard->base[range], __ATOMIC_ACQUIRE);
    if (base == 0 || at < base || at - base >= RINGFOLD_HINTS_FILE_BYTES) continue;
    if (mmap((void*)base, RINGFOLD_HINTS_FILE_BYTES, PROT_READ, MAP_PRIVATE | RINGFOLD_AGENT_ANONYMOUS | MAP_FIXED, -1,
             0) == MAP_FAILED)
      break;
    errno = kept;
    return;
  }
  if ((guard->before.sa_flags & SA_SIGINFO) != 0) {
    guard->before.sa_sigaction(number, about, context);
  } else if (guard->before.sa_handler != SIG_DFL && guard->before.sa_handler != SIG_IGN) {
    guard->before.sa_handler(number);
  } else { /* as if there had never been a handler: a fault comes again at once, what was sent is sent again */
    sigaction(number, &guard->before, 0);
    if (about->si_code <= 0) raise(number);
  }
  errno = kept;
}

/* 0, or -1 if too many mappings are guarded. */
static inline int ringfold_hints_guard(const struct ringfold_hints_map* map) {
  struct ringfold_guard* guard = &ringfold_guard_v2;
  struct sigaction ours;
  int range, found = -1;
  while (__atomic_test_and_set(&guard->lock, __ATOMIC_ACQUIRE)) sched_yield();
  if (!guard->is_installed) {
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = ringfold_guard_on_bus_error;
    ours.sa_flags = SA_SIGINFO | RINGFOLD_AGENT_ONSTACK;
    sigemptyset(&ours.sa_mask);
    guard->is_installed = sigaction(SIGBUS, &ours, &guard->before) == 0;
  }
  for (range = 0; range < RINGFOLD_GUARD_RANGES && found < 0 && guard->is_installed; ++range) {
    if (guard->base[range] == 0) found = range;
  }
  if (found >= 0) __atomic_store_n(&guard->base[found], (uintptr_t)map->base, __ATOMIC_RELEASE);
  __atomic_clear(&guard->lock, __ATOMIC_RELEASE);
  return found >= 0 ? 0 : -1;
}

/* Before the mapping is closed. */
static inline void ringfold_hints_unguard(const struct ringfold_hints_map* map) {
  struct ringfold_guard* guard = &ringfold_guard_v2;
  int range;
  if (map->base == 0) return;
  while (__atomic_test_and_set(&guard->lock, __ATOMIC_ACQUIRE)) sched_yield();
  for (range = 0; range < RINGFOLD_GUARD_RANGES; ++range) {
    if (guard->base[range] == (uintptr_t)map->base) __atomic_store_n(&guard->base[range], 0, __ATOMIC_RELEASE);
  }
  __atomic_clear(&guard->lock, __ATOMIC_RELEASE);
}

/* The shell: the socket, the mapping, and when to connect. */

#define RINGFOLD_AGENT_MAX_DIRECTORY 96 /* a socket's address has 108 bytes */

struct ringfold_agent {
  struct ringfold_agent_core core;
  int fd; /* -1: not connected. For your own poll(2): POLLIN, and POLLOUT while ringfold_agent_wants_write */
  int pid;
  char directories[2][RINGFOLD_AGENT_MAX_DIRECTORY];
  int directory;        /* of the agent in use */
  const char* distrust; /* why the last agent that was found is not used; 0: it is, or there was none */
  struct ringfold_hints_map map;
  enum ringfold_hints_state hints;
  uint64_t next_map_ns, next_connect_ns, away_since_ns, connected_ns;
  uint32_t requests_per_hint; /* 0: as the agent advises */
};

/* Opens a client. `directory` is the agent's runtime directory; 0: where an agent of this user or of root is. Fails
 * only for a directory that is too long. */
static inline int ringfold_agent_open(struct ringfold_agent* agent, const char* directory, const char* name) {
  const char* session = getenv("XDG_RUNTIME_DIR");
  const size_t size = RINGFOLD_AGENT_MAX_DIRECTORY;
  int length = 0;
  memset(agent, 0, sizeof *agent);
  ringfold_agent_core_init(&agent->core, name);
  agent->fd = -1;
  agent->pid = (int)getpid();
  agent->hints = RINGFOLD_HINTS_MISSING;
  agent->away_since_ns = ringfold_hints_now();
  if (directory != 0) {
    length = snprintf(agent->directories[0], size, "%s", directory);
  } else {
    if (geteuid() == 0) {
      agent->directories[0][0] = 0;
    } else if (session != 0 && session[0] != 0) {
      length = snprintf(agent->directories[0], size, "%s/ringfold", session);
    } else {
      length = snprintf(agent->directories[0], size, "/tmp/ringfold-%u", (unsigned)geteuid());
    }
    (void)snprintf(agent->directories[1], size, "/run/ringfold");
  }
  return length >= 0 && (size_t)length < size ? RINGFOLD_AGENT_OK : RINGFOLD_AGENT_INVALID;
}

static inline int ringfold_agent_is_forked(const struct ringfold_agent* agent) { return agent->pid != (int)getpid(); }

static inline void ringfold_agent_path_of(const struct ringfold_agent* agent, int directory, const char* name,
                                          char* path, size_t bytes) {
  (void)snprintf(path, bytes, "%s/%s", agent->directories[directory], name);
}

static inline void ringfold_agent_unmap(struct ringfold_agent* agent) {
  ringfold_hints_unguard(&agent->map);
  ringfold_hints_close(&agent->map);
}

/* Why a file or directory is not trusted; 0 if it is: it belongs to root or to this user, and others cannot write. */
static inline const char* ringfold_agent_distrust(const char* path) {
  struct stat about;
  if (lstat(path, &about) != 0) return "it is not there";
  if (about.st_uid != 0 && about.st_uid != geteuid()) return "it belongs to another user";
  if (S_ISLNK(about.st_mode)) return "it is a link";
  if ((about.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "others may write to it";
  return 0;
}

static inline int ringfold_agent_connect_to(struct ringfold_agent* agent, int directory) {
  struct sockaddr_un address;
  struct stat about;
  char hints[sizeof address.sun_path];
  const char* why;
  int fd;
  if (agent->directories[directory][0] == 0) return -1;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  ringfold_agent_path_of(agent, directory, "agent.sock", address.sun_path, sizeof address.sun_path);
  if (lstat(address.sun_path, &about) != 0) return -1;
  ringfold_agent_path_of(agent, directory, "hints", hints, sizeof hints);
  why = ringfold_agent_distrust(agent->directories[directory]);
  if (why == 0) why = ringfold_agent_distrust(hints);
  agent->distrust = why;
  if (why != 0) return -1;
  fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd >= 0 && connect(fd, (const struct sockaddr*)&address, sizeof address) != 0) {
    close(fd);
    fd = -1;
  }
  return fd;
}

/* The pause before the next attempt: an eighth of the time without an agent, so that a restarted one is found soon. */
static inline uint64_t ringfold_agent_reconnect_delay(uint64_t away_ns) {
  const uint64_t delay_ns = away_ns / 8;
  if (delay_ns < RINGFOLD_AGENT_MIN_RECONNECT_NS) return RINGFOLD_AGENT_MIN_RECONNECT_NS;
  return delay_ns > RINGFOLD_AGENT_MAX_RECONNECT_NS ? RINGFOLD_AGENT_MAX_RECONNECT_NS : delay_ns;
}

static inline void ringfold_agent_connect(struct ringfold_agent* agent, uint64_t now_ns) {
  int directory;
  for (directory = 0; directory < 2 && agent->fd < 0; ++directory) {
    agent->fd = ringfold_agent_connect_to(agent, directory);
    if (agent->fd >= 0) agent->directory = directory;
  }
  if (agent->fd >= 0) {
    agent->connected_ns = now_ns;
    agent->next_map_ns = 0;
    ringfold_agent_core_connected(&agent->core, now_ns);
  } else {
    const uint64_t away_ns = now_ns > agent->away_since_ns ? now_ns - agent->away_since_ns : 0;
    agent->next_connect_ns = now_ns + ringfold_agent_reconnect_delay(away_ns);
  }
}

static inline void ringfold_agent_disconnect(struct ringfold_agent* agent, uint64_t now_ns) {
  uint64_t away_ns;
  (void)shutdown(agent->fd, SHUT_RDWR); /* a forked child may have a copy of the socket, which would keep the flows */
  close(agent->fd);
  agent->fd = -1;
  ringfold_agent_core_disconnected(&agent->core);
  if (now_ns - agent->connected_ns > RINGFOLD_AGENT_MIN_SERVED_NS) agent->away_since_ns = now_ns;
  away_ns = now_ns > agent->away_since_ns ? now_ns - agent->away_since_ns : 0;
  agent->next_connect_ns = now_ns + ringfold_agent_reconnect_delay(away_ns);
}

/* Sends what is queued; -1 if the connection has ended. */
static inline int ringfold_agent_flush(struct ringfold_agent* agent) {
  struct ringfold_agent_core* core = &agent->core;
  while (core->out_begin < core->out_end) {
    const ssize_t sent = send(agent->fd, core->out + core->out_begin, core->out_end - core->out_begin, MSG_NOSIGNAL);
    if (sent > 0) {
      core->out_begin += (size_t)sent;
    } else if (sent < 0 && errno == EINTR) {
      continue;
    } else if (sent < 0 && errno == EPIPE) { /* its last response may be the reason, and is read first */
      core->out_begin = core->out_end;
    } else {
      return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : -1;
    }
  }
  core->out_begin = core->out_end = 0;
  return 0;
}

/* Reads and applies responses; -1 if the connection has ended. */
static inline int ringfold_agent_read(struct ringfold_agent* agent, uint64_t now_ns) {
  uint8_t bytes[4096];
  for (;;) {
    const ssize_t got = recv(agent->fd, bytes, sizeof bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (got <= 0) return -1;
    if (ringfold_agent_core_receive(&agent->core, bytes, (size_t)got, now_ns) != 0) return -1;
    if ((size_t)got < sizeof bytes) return 0;
  }
}

/* Whether the hints are fresh: RINGFOLD_HINTS_OK. Call it once per turn. It makes a system call only while they are not
 * (every 100 ms): the file may be another one, or whole again. */
static inline enum ringfold_hints_state ringfold_agent_look(struct ringfold_agent* agent, uint64_t now_ns) {
  char path[RINGFOLD_AGENT_MAX_DIRECTORY + 8];
  agent->hints = ringfold_hints_look(&agent->map, now_ns);
  if (agent->hints == RINGFOLD_HINTS_OK || agent->fd < 0 || now_ns < agent->next_map_ns) return agent->hints;
  agent->next_map_ns = now_ns + RINGFOLD_AGENT_REMAP_NS;
  ringfold_agent_path_of(agent, agent->directory, "hints", path, sizeof path);
  if (agent->hints != RINGFOLD_HINTS_FOREIGN && ringfold_hints_is_current(path, &agent->map)) return agent->hints;
  ringfold_agent_unmap(agent);
  agent->hints = ringfold_hints_map_file(path, &agent->map);
  if (agent->map.base == 0) return agent->hints;
  if (ringfold_hints_guard(&agent->map) != 0) { /* before the first read: the file may have shrunk since */
    ringfold_hints_close(&agent->map);
    return agent->hints = RINGFOLD_HINTS_MISSING;
  }
  agent->hints = ringfold_hints_look(&agent->map, now_ns);
  if (agent->hints == RINGFOLD_HINTS_FOREIGN) ringfold_agent_unmap(agent);
  return agent->hints;
}

/* Does what is due: connects, registers, sends, receives, renews. Call it every few milliseconds, and when `fd` is
 * readable; `now_ns` is CLOCK_MONOTONIC (ringfold_hints_now). Returns the state of the connection. */
static inline enum ringfold_agent_state ringfold_agent_poll(struct ringfold_agent* agent, uint64_t now_ns) {
  if (ringfold_agent_is_forked(agent)) return RINGFOLD_AGENT_AWAY;
  if (agent->fd < 0 && now_ns >= agent->next_connect_ns) ringfold_agent_connect(agent, now_ns);
  if (agent->fd >= 0) {
    /* Responses first: a caller that comes late must not take them for silence. */
    int has_ended = ringfold_agent_read(agent, now_ns) != 0;
    if (!has_ended) {
      ringfold_agent_core_tick(&agent->core, now_ns);
      has_ended = ringfold_agent_flush(agent) != 0 || agent->core.is_broken;
    }
    if (has_ended) ringfold_agent_disconnect(agent, now_ns);
  }
  ringfold_agent_look(agent, now_ns);
  return agent->core.state;
}

static inline int ringfold_agent_wants_write(const struct ringfold_agent* agent) {
  return agent->core.out_end > agent->core.out_begin;
}

/* Registers a flow; its number, from 0, or an error. Its place follows when an agent has assigned one. */
static inline int ringfold_agent_register(struct ringfold_agent* agent, const struct ringfold_agent_flow* flow) {
  int id;
  if (ringfold_agent_is_forked(agent)) return RINGFOLD_AGENT_FORKED;
  id = ringfold_agent_core_add(&agent->core, flow, ringfold_hints_now());
  if (id >= 0) agent->next_connect_ns = 0; /* a new flow ends the pause */
  return id;
}

/* Requests the place of a flow again. `poll` does that for one flow a second, in turn: so an agent that is there and
 * does not respond is noticed, and left after RINGFOLD_AGENT_SILENT_NS. */
static inline int ringfold_agent_renew(struct ringfold_agent* agent, int id) {
  if (ringfold_agent_is_forked(agent)) return RINGFOLD_AGENT_FORKED;
  return ringfold_agent_core_renew(&agent->core, id, ringfold_hints_now());
}

/* The flow has ended. Its number may be that of a later flow. */
static inline int ringfold_agent_remove(struct ringfold_agent* agent, int id) {
  if (ringfold_agent_is_forked(agent)) return RINGFOLD_AGENT_FORKED;
  return ringfold_agent_core_remove(&agent->core, id, ringfold_hints_now());
}

/* Reports what was measured on each path; see ringfold_agent_core_report. `poll` sends it. */
static inline int ringfold_agent_report(struct ringfold_agent* agent, int id, const uint64_t* bytes_per_s,
                                        const uint32_t* srtt_us, const uint32_t* min_rtt_us) {
  if (ringfold_agent_is_forked(agent)) return RINGFOLD_AGENT_FORKED;
  return ringfold_agent_core_report(&agent->core, id, bytes_per_s, srtt_us, min_rtt_us);
}

static inline enum ringfold_flow_state ringfold_agent_flow_state(const struct ringfold_agent* agent, int id) {
  const struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&agent->core, id);
  return entry == 0 ? RINGFOLD_FLOW_NONE : entry->state;
}

/* Reads the table at every n-th request of a flow (ringfold_agent_hint); the calls between return the same again. 0: as
 * the agent advises (its setting agent_requests_per_hint), which is at every request unless somebody set it. */
static inline void ringfold_agent_set_requests_per_hint(struct ringfold_agent* agent, uint32_t requests) {
  agent->requests_per_hint = requests;
}

/* The hint for the next request of a flow: RINGFOLD_HINT_READ fills `hint`. RINGFOLD_HINT_LOCAL: there is no advice;
 * split by what you measure. RINGFOLD_HINT_BUSY (only beyond four paths): `hint` is as it was. It is valid as of the
 * last look. */
static inline enum ringfold_hint_result ringfold_agent_hint(struct ringfold_agent* agent, int id,
                                                            struct ringfold_hint* hint) {
  struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&agent->core, id);
  if (entry == 0 || entry->state != RINGFOLD_FLOW_PLACED || agent->hints != RINGFOLD_HINTS_OK)
    return RINGFOLD_HINT_LOCAL;
  if (entry->requests_left == 0 || entry->last_result != RINGFOLD_HINT_READ) {
    entry->requests_left = agent->requests_per_hint != 0 ? agent->requests_per_hint : agent->core.requests_per_hint;
    if (entry->requests_left == 0) entry->requests_left = 1;
    entry->last_result = ringfold_hint_read(agent->map.base, entry->slot, entry->generation, &entry->last_hint);
  }
  entry->requests_left -= 1;
  if (entry->last_result == RINGFOLD_HINT_READ) *hint = entry->last_hint;
  return entry->last_result;
}

/* Whether the shares of the hint that was read last bind over the whole transfer (somebody fixed them): 1. Else they
 * are where to begin, and a transport that measures may deviate: 0. */
static inline int ringfold_agent_is_fixed(const struct ringfold_agent* agent, int id) {
  const struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&agent->core, id);
  if (entry == 0 || entry->state != RINGFOLD_FLOW_PLACED || agent->hints != RINGFOLD_HINTS_OK) return 0;
  return (ringfold_hint_flags(agent->map.base, entry->slot) & RINGFOLD_HINT_FIXED) != 0;
}

/* Polls until the flow has a place or is refused, or until the timeout. For programs that start, and for tests. */
static inline enum ringfold_flow_state ringfold_agent_wait(struct ringfold_agent* agent, int id, int timeout_ms) {
  const uint64_t deadline_ns = ringfold_hints_now() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * RINGFOLD_AGENT_MS;
  for (;;) {
    const uint64_t now_ns = ringfold_hints_now();
    enum ringfold_flow_state state;
    struct pollfd ready;
    ringfold_agent_poll(agent, now_ns);
    state = ringfold_agent_flow_state(agent, id);
    if (state != RINGFOLD_FLOW_WAITING && state != RINGFOLD_FLOW_REQUESTED) return state;
    if (now_ns >= deadline_ns || ringfold_agent_is_forked(agent)) return state;
    ready.fd = agent->fd;
    ready.events = (short)(POLLIN | (ringfold_agent_wants_write(agent) ? POLLOUT : 0));
    (void)poll(&ready, 1, 10);
  }
}

/* Ends the connection, and with it every flow of this client. In a forked child it only frees the child's copy. */
static inline void ringfold_agent_close(struct ringfold_agent* agent) {
  if (agent->fd >= 0) {
    if (!ringfold_agent_is_forked(agent)) (void)shutdown(agent->fd, SHUT_RDWR);
    close(agent->fd);
  }
  agent->fd = -1;
  ringfold_agent_unmap(agent);
  ringfold_agent_core_free(&agent->core);
  agent->hints = RINGFOLD_HINTS_MISSING;
}

/* Splitting: which path gets the next piece of so many bytes, so that the bytes follow the shares. Each path has a
 * credit that grows by its share of every piece; the path with the most credit gets the piece. */

struct ringfold_split {
  int64_t credit[RINGFOLD_HINTS_MOST_PATHS];
};

#define RINGFOLD_SPLIT_MAX_CREDIT (INT64_C(65535) << 22) /* 4 MiB: older deviations are forgotten */

static inline uint32_t ringfold_split_next(struct ringfold_split* split, const struct ringfold_hint* hint,
                                           uint32_t bytes) {
  const uint32_t all = (1u << hint->paths) - 1u;
  const uint32_t held = (hint->backpressure & all) == all ? 0 : hint->backpressure;
  uint32_t path, best = 0;
  int has_best = 0;
  for (path = 0; path < hint->paths; ++path) {
    int64_t* credit = &split->credit[path];
    if ((held >> path & 1u) != 0 || hint->shares[path] == 0) { /* owes nothing, and is owed nothing */
      *credit = 0;
      continue;
    }
    *credit += (int64_t)hint->shares[path] * bytes;
    if (*credit > RINGFOLD_SPLIT_MAX_CREDIT) *credit = RINGFOLD_SPLIT_MAX_CREDIT;
    if (!has_best || *credit > split->credit[best]) best = path;
    has_best = 1;
  }
  split->credit[best] -= (int64_t)RINGFOLD_SHARE_ALL * bytes;
  if (split->credit[best] < -RINGFOLD_SPLIT_MAX_CREDIT) split->credit[best] = -RINGFOLD_SPLIT_MAX_CREDIT;
  return best;
}

#if defined(__cplusplus)
}
#endif

#endif
