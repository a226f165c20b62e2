/* What the core of ringfold_agent.h does by time, and how many tables the guard has room for. Prints what is wrong. */
#include "ringfold_agent.h"

#define SECOND (1000 * RINGFOLD_AGENT_MS)
#define FLOWS 3

static int failures;

static void check(int holds, const char* what) {
  if (holds) return;
  puts(what);
  failures += 1;
}

static void respond(struct ringfold_agent_core* core, enum ringfold_agent_type type, int kind, uint32_t request,
                    size_t rest_bytes, uint64_t now_ns) {
  uint8_t frame[RINGFOLD_AGENT_MAX_RESPONSE];
  memset(frame, 0, sizeof frame);
  ringfold_agent_put32(frame, (uint32_t)(1 + RINGFOLD_AGENT_HEAD_BYTES + rest_bytes));
  frame[5] = RINGFOLD_AGENT_MARK;
  frame[6] = RINGFOLD_AGENT_VERSION;
  frame[7] = (uint8_t)type;
  frame[8] = (uint8_t)kind;
  ringfold_agent_put32(frame + 9, request);
  check(ringfold_agent_core_receive(core, frame, RINGFOLD_AGENT_FRAME_BYTES + RINGFOLD_AGENT_HEAD_BYTES + rest_bytes,
                                    now_ns) == 0,
        "a response is not accepted");
}

static void start(struct ringfold_agent_core* core, uint64_t now_ns) {
  ringfold_agent_core_init(core, "turns");
  ringfold_agent_core_connected(core, now_ns);
  respond(core, RINGFOLD_AGENT_WELCOME, 0, 1, 0, now_ns);
}

static void add(struct ringfold_agent_core* core, uint64_t now_ns) {
  struct ringfold_agent_flow flow;
  ringfold_agent_flow_init(&flow, "10.0.0.1", "10.0.0.2");
  ringfold_agent_flow_add_path(&flow, "10.0.0.1", "10.0.0.2");
  ringfold_agent_flow_add_path(&flow, "10.1.0.1", "10.1.0.2");
  check(ringfold_agent_core_add(core, &flow, now_ns) >= 0, "a flow is not added");
}

/* A request waits to be sent until the caller comes again: that is not the agent's silence. */
static void a_late_caller_does_not_leave_a_healthy_agent(void) {
  struct ringfold_agent_core core;
  uint64_t now_ns = SECOND;
  int turn;
  start(&core, now_ns);
  ringfold_agent_core_tick(&core, now_ns);
  add(&core, now_ns + 1);
  now_ns += 2 * RINGFOLD_AGENT_SILENT_NS;
  ringfold_agent_core_tick(&core, now_ns);
  check(!core.is_broken, "a healthy agent is left by a caller that was late");
  for (turn = 0; turn < 9; ++turn) ringfold_agent_core_tick(&core, now_ns += SECOND);
  check(!core.is_broken, "an agent is left too early");
  for (turn = 0; turn < 2; ++turn) ringfold_agent_core_tick(&core, now_ns += SECOND);
  check(core.is_broken, "a silent agent is not left");
  ringfold_agent_core_free(&core);
}

static void flows_beyond_a_limit_are_tried_in_turn(void) {
  struct ringfold_agent_core core;
  uint64_t now_ns = SECOND;
  int tries[FLOWS] = {0}, turn, each;
  start(&core, now_ns);
  for (each = 0; each < FLOWS; ++each) {
    add(&core, now_ns);
    respond(&core, RINGFOLD_AGENT_REFUSED, RINGFOLD_REFUSAL_QUOTA, core.entries[each].request,
            RINGFOLD_AGENT_TEXT_BYTES, now_ns);
  }
  for (turn = 0; turn < 2 * FLOWS; ++turn) {
    ringfold_agent_core_tick(&core, now_ns += RINGFOLD_AGENT_RETRY_NS);
    for (each = 0; each < FLOWS; ++each) {
      if (core.entries[each].state != RINGFOLD_FLOW_REQUESTED) continue;
      tries[each] += 1;
      respond(&core, RINGFOLD_AGENT_REFUSED, RINGFOLD_REFUSAL_QUOTA, core.entries[each].request,
              RINGFOLD_AGENT_TEXT_BYTES, now_ns);
    }
  }
  for (each = 0; each < FLOWS; ++each) check(tries[each] == 2, "not every refused flow has its turn");
  ringfold_agent_core_free(&core);
}

static void many_agents_are_guarded(void) {
  struct ringfold_hints_map map = {0, 0, 0};
  static char page[RINGFOLD_GUARD_RANGES + 1];
  int each, guarded = 0;
  for (each = 0; each <= RINGFOLD_GUARD_RANGES; ++each) {
    map.base = &page[each];
    guarded += ringfold_hints_guard(&map) == 0;
  }
  check(guarded == RINGFOLD_GUARD_RANGES, "the guard has another number of ranges");
  check(guarded >= 1000, "fewer than a thousand agents are guarded");
  map.base = &page[7];
  ringfold_hints_unguard(&map);
  check(ringfold_hints_guard(&map) == 0, "a range is not used again");
}

int main(void) {
  a_late_caller_does_not_leave_a_healthy_agent();
  flows_beyond_a_limit_are_tried_in_turn();
  many_agents_are_guarded();
  return failures == 0 ? 0 : 1;
}
