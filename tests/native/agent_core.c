/* The core of ringfold_agent.h as a shared library, for simulations that drive it from Python, and with planted bugs.
 */
#include "ringfold_agent.h"

#define EXPORT __attribute__((visibility("default")))

enum planted { NOTHING = 0, REGISTERS_ONCE = 1, REMOVES_SILENTLY = 2, TAKES_ANY_RESPONSE = 3 };

struct client {
  struct ringfold_agent_core core;
  int planted;
};

EXPORT struct client* client_new(int planted);
EXPORT void client_free(struct client* client);
EXPORT int client_add(struct client* client, const char* source, const char* destination, int paths,
                      const char* const* locals, const char* const* remotes, uint64_t now_ns);
EXPORT int client_remove(struct client* client, int id, uint64_t now_ns);
EXPORT void client_connected(struct client* client, uint64_t now_ns);
EXPORT void client_disconnected(struct client* client);
EXPORT int client_receive(struct client* client, const void* bytes, size_t count, uint64_t now_ns);
EXPORT int client_tick(struct client* client, uint64_t now_ns);
EXPORT size_t client_outgoing(struct client* client, void* bytes, size_t capacity);
EXPORT int client_place(struct client* client, int id, uint32_t* slot, uint32_t* generation);

struct client* client_new(int planted) {
  struct client* client = (struct client*)calloc(1, sizeof *client);
  if (client == 0) abort();
  ringfold_agent_core_init(&client->core, "simulated");
  client->planted = planted;
  return client;
}

void client_free(struct client* client) {
  ringfold_agent_core_free(&client->core);
  free(client);
}

int client_add(struct client* client, const char* source, const char* destination, int paths, const char* const* locals,
               const char* const* remotes, uint64_t now_ns) {
  struct ringfold_agent_flow flow;
  int path;
  if (ringfold_agent_flow_init(&flow, source, destination) != 0) return RINGFOLD_AGENT_INVALID;
  for (path = 0; path < paths; ++path) {
    if (ringfold_agent_flow_add_path(&flow, locals[path], remotes[path]) != 0) return RINGFOLD_AGENT_INVALID;
  }
  return ringfold_agent_core_add(&client->core, &flow, now_ns);
}

int client_remove(struct client* client, int id, uint64_t now_ns) {
  struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&client->core, id);
  if (client->planted == REMOVES_SILENTLY && entry != 0) entry->state = RINGFOLD_FLOW_WAITING;
  return ringfold_agent_core_remove(&client->core, id, now_ns);
}

void client_connected(struct client* client, uint64_t now_ns) {
  const uint32_t count = client->core.count;
  const int has_been_connected = client->core.registered > 0;
  if (client->planted == REGISTERS_ONCE && has_been_connected) client->core.count = 0;
  ringfold_agent_core_connected(&client->core, now_ns);
  client->core.count = count;
}

void client_disconnected(struct client* client) { ringfold_agent_core_disconnected(&client->core); }

/* As if numbers of connections and requests meant nothing: the place of any response is that of every flow. */
static void take_any_response(struct ringfold_agent_core* core, const uint8_t* frame, size_t bytes) {
  uint32_t each;
  if (bytes != 29 || frame[7] != RINGFOLD_AGENT_REGISTERED) return;
  for (each = 0; each < core->count; ++each) {
    if (core->entries[each].state != RINGFOLD_FLOW_REQUESTED) continue;
    core->entries[each].state = RINGFOLD_FLOW_PLACED;
    core->entries[each].slot = ringfold_agent_get32(frame + 21);
    core->entries[each].generation = ringfold_agent_get32(frame + 25);
  }
}

int client_receive(struct client* client, const void* bytes, size_t count, uint64_t now_ns) {
  const int result = ringfold_agent_core_receive(&client->core, bytes, count, now_ns);
  if (client->planted == TAKES_ANY_RESPONSE) take_any_response(&client->core, (const uint8_t*)bytes, count);
  return result;
}

int client_tick(struct client* client, uint64_t now_ns) {
  ringfold_agent_core_tick(&client->core, now_ns);
  return client->core.is_broken ? -1 : 0;
}

/* Takes whole what is queued, or nothing if it does not fit. */
size_t client_outgoing(struct client* client, void* bytes, size_t capacity) {
  struct ringfold_agent_core* core = &client->core;
  const size_t queued = core->out_end - core->out_begin;
  if (queued == 0 || queued > capacity) return 0;
  memcpy(bytes, core->out + core->out_begin, queued);
  core->out_begin = core->out_end = 0;
  return queued;
}

int client_place(struct client* client, int id, uint32_t* slot, uint32_t* generation) {
  const struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&client->core, id);
  if (entry == 0 || entry->state != RINGFOLD_FLOW_PLACED) return -1;
  *slot = entry->slot;
  *generation = entry->generation;
  return 0;
}
