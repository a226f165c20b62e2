/* A client of the agent that knows ringfold_agent.h and nothing else, driven by lines on its standard input.
 *
 *   agent_client DIRECTORY NAME
 *
 *   register SOURCE DESTINATION LOCAL,REMOTE...   the flow's number, or an error below 0
 *   poll                                          the state of the connection
 *   wait ID MS                                    the state of the flow
 *   state ID                                      the state of the flow, its slot and generation
 *   hint ID                                       `local`, `busy`, or `PATHS BACKPRESSURE SHARE...`
 *   fixed ID                                      1 if the shares bind
 *   look                                          the state of the hints
 *   every REQUESTS                                nothing: so many requests share a read; 0: as the agent advises
 *   report ID RATE...                             `0`; rates of 1, 2, ... us of RTT besides
 *   renew ID, remove ID                           `0`, or an error
 *   refusal ID                                    the kind and the text of a flow's refusal; of the connection for -1
 *   counts                                        registered, refused, unanswered
 *   fork                                          what a child's copy answers to register, renew and poll
 *   child                                         the pid of a child that stays, with its copy, until it is killed
 *   close                                         `closed`: the flows have ended; no command may follow
 *   split BYTES PIECES ID                         how many pieces each path gets by the flow's hint */
#include "ringfold_agent.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

static struct ringfold_agent agent;

static int register_flow(char* words) {
  struct ringfold_agent_flow flow;
  char* source = strtok(words, " ");
  char* destination = strtok(0, " ");
  char* pair;
  if (source == 0 || destination == 0) return RINGFOLD_AGENT_INVALID;
  if (ringfold_agent_flow_init(&flow, source, destination) != RINGFOLD_AGENT_OK) return RINGFOLD_AGENT_INVALID;
  while ((pair = strtok(0, " ")) != 0) {
    char* remote = strchr(pair, ',');
    if (remote == 0) return RINGFOLD_AGENT_INVALID;
    *remote = 0;
    if (ringfold_agent_flow_add_path(&flow, pair, remote + 1) != RINGFOLD_AGENT_OK) return RINGFOLD_AGENT_INVALID;
  }
  return ringfold_agent_register(&agent, &flow);
}

static void print_hint(int id) {
  struct ringfold_hint hint = {{0}, 0, 0};
  unsigned path;
  ringfold_agent_look(&agent, ringfold_hints_now());
  switch (ringfold_agent_hint(&agent, id, &hint)) {
    case RINGFOLD_HINT_LOCAL:
      printf("local");
      return;
    case RINGFOLD_HINT_BUSY:
      printf("busy");
      return;
    case RINGFOLD_HINT_READ:
      break;
  }
  printf("%u %u", (unsigned)hint.paths, (unsigned)hint.backpressure);
  for (path = 0; path < hint.paths; ++path) printf(" %u", (unsigned)hint.shares[path]);
}

static int report(char* words) {
  uint64_t rates[RINGFOLD_HINTS_MOST_PATHS] = {0};
  uint32_t rtts[RINGFOLD_HINTS_MOST_PATHS] = {0};
  const int id = atoi(strtok(words, " "));
  char* word;
  uint32_t path = 0;
  while ((word = strtok(0, " ")) != 0 && path < RINGFOLD_HINTS_MOST_PATHS) {
    rates[path] = strtoull(word, 0, 10);
    rtts[path] = path + 1;
    path += 1;
  }
  return ringfold_agent_report(&agent, id, rates, rtts, rtts);
}

static void print_refusal(int id) {
  const struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&agent.core, id);
  if (entry == 0) {
    printf("%d %s", (int)agent.core.refusal, agent.core.text);
  } else {
    printf("%d %s", (int)entry->refusal, entry->text);
  }
}

static void try_as_a_child(void) {
  int status = 0;
  const pid_t child = fork();
  if (child == 0) {
    char words[] = "10.0.0.1 10.0.0.2 10.0.0.1,10.0.0.2 10.1.0.1,10.1.0.2";
    const int refused = register_flow(words) == RINGFOLD_AGENT_FORKED && ringfold_agent_renew(&agent, 0) == -3 &&
                        ringfold_agent_remove(&agent, 0) == -3 &&
                        ringfold_agent_poll(&agent, ringfold_hints_now()) == RINGFOLD_AGENT_AWAY;
    ringfold_agent_close(&agent);
    _exit(refused ? 7 : 1);
  }
  waitpid(child, &status, 0);
  printf("%d", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* The child leaves its copy alone, as one does that knows nothing of the agent. */
static void keep_a_child(void) {
  const pid_t child = fork();
  if (child == 0) {
    close(0);
    close(1);
    alarm(600);
    for (;;) pause();
  }
  printf("%d", (int)child);
}

static void split(char* words) {
  struct ringfold_split split;
  struct ringfold_hint hint = {{0}, 0, 0};
  unsigned counts[RINGFOLD_HINTS_MOST_PATHS] = {0}, path, piece, bytes = 0, pieces = 0;
  int id = 0;
  memset(&split, 0, sizeof split);
  if (sscanf(words, "%u %u %d", &bytes, &pieces, &id) != 3) return;
  ringfold_agent_look(&agent, ringfold_hints_now());
  if (ringfold_agent_hint(&agent, id, &hint) != RINGFOLD_HINT_READ) {
    printf("local");
    return;
  }
  for (piece = 0; piece < pieces; ++piece) counts[ringfold_split_next(&split, &hint, bytes)] += 1;
  for (path = 0; path < hint.paths; ++path) printf(path == 0 ? "%u" : " %u", counts[path]);
}

static void run_command(char* line) {
  char* rest = strchr(line, ' ');
  char none[1] = {0};
  int id, timeout_ms = 0;
  if (rest != 0) *rest++ = 0;
  if (rest == 0) rest = none;
  id = atoi(rest);
  if (strcmp(line, "register") == 0) printf("%d", register_flow(rest));
  if (strcmp(line, "poll") == 0) printf("%d", (int)ringfold_agent_poll(&agent, ringfold_hints_now()));
  if (strcmp(line, "look") == 0) printf("%d", (int)ringfold_agent_look(&agent, ringfold_hints_now()));
  if (strcmp(line, "wait") == 0 && sscanf(rest, "%d %d", &id, &timeout_ms) == 2)
    printf("%d", (int)ringfold_agent_wait(&agent, id, timeout_ms));
  if (strcmp(line, "state") == 0) {
    const struct ringfold_agent_entry* entry = ringfold_agent_core_entry(&agent.core, id);
    printf("%d", (int)ringfold_agent_flow_state(&agent, id));
    if (entry != 0) printf(" %u %u", (unsigned)entry->slot, (unsigned)entry->generation);
  }
  if (strcmp(line, "hint") == 0) print_hint(id);
  if (strcmp(line, "fixed") == 0) printf("%d", ringfold_agent_is_fixed(&agent, id));
  if (strcmp(line, "every") == 0) ringfold_agent_set_requests_per_hint(&agent, (uint32_t)id);
  if (strcmp(line, "report") == 0) printf("%d", report(rest));
  if (strcmp(line, "renew") == 0) printf("%d", ringfold_agent_renew(&agent, id));
  if (strcmp(line, "remove") == 0) printf("%d", ringfold_agent_remove(&agent, id));
  if (strcmp(line, "refusal") == 0) print_refusal(id);
  if (strcmp(line, "counts") == 0)
    printf("%u %u %u", (unsigned)agent.core.registered, (unsigned)agent.core.refused, (unsigned)agent.core.unanswered);
  if (strcmp(line, "fork") == 0) try_as_a_child();
  if (strcmp(line, "child") == 0) keep_a_child();
  if (strcmp(line, "close") == 0) {
    ringfold_agent_close(&agent);
    printf("closed");
  }
  if (strcmp(line, "split") == 0) split(rest);
  puts("");
}

int main(int count, char** arguments) {
  char line[4096];
  if (count != 3 || ringfold_agent_open(&agent, arguments[1], arguments[2]) != RINGFOLD_AGENT_OK) return 2;
  setvbuf(stdout, 0, _IOLBF, 0);
  while (fgets(line, sizeof line, stdin) != 0) {
    line[strcspn(line, "\n")] = 0;
    run_command(line);
  }
  ringfold_agent_close(&agent);
  return 0;
}
