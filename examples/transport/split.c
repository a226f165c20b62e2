/* A small transport in C that splits what it sends over several paths, by the hints of the host's agent.
 *
 *   cc -O2 -Iinclude examples/transport/split.c -o split
 *   ./split receive 7000 127.0.0.1 127.0.0.2
 *   ./split send 7000 127.0.0.1,127.0.0.1 127.0.0.2,127.0.0.2 [--mb 100] [--mbit 200] [--dir DIRECTORY]
 *
 * The sender has a TCP connection per path (LOCAL,REMOTE) and registers one flow with all of them. It cuts its bytes
 * into segments and chooses a path for each when it is posted, as a transport does that cannot take a request back: by
 * the hint if there is one, else by the rates that it measured itself. It reports those rates to the agent. It prints a
 * line whenever the split changes. The receiver checks that every segment arrives once and whole.
 *
 * The four places where a transport meets the agent are marked with [agent]. */
#include "ringfold_agent.h"

#include <linux/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/ioctl.h>

#define SEGMENT 65536u
#define MAX_POSTED 4u /* segments per path that are posted and not written */
#define MAX_PATHS RINGFOLD_HINTS_MOST_PATHS
#define MAX_MB 65536u
#define POLL_NS (5 * RINGFOLD_AGENT_MS)
#define REPORT_NS (100 * RINGFOLD_AGENT_MS)

struct segment {
  uint64_t offset, total;
  uint32_t bytes, reserved;
};

static void fail(const char* what, ...) {
  va_list more;
  va_start(more, what);
  fputs("split: ", stderr);
  vfprintf(stderr, what, more);
  fprintf(stderr, "%s%s\n", errno != 0 ? ": " : "", errno != 0 ? strerror(errno) : "");
  va_end(more);
  exit(1);
}

static void fill(uint8_t* bytes, uint64_t offset, uint32_t count) {
  uint32_t at;
  for (at = 0; at < count; ++at) bytes[at] = (uint8_t)((offset + at) * 31 >> 8);
}

static socklen_t address_of(struct sockaddr_storage* to, const char* text, int port) {
  struct sockaddr_in* four = (struct sockaddr_in*)to;
  struct sockaddr_in6* six = (struct sockaddr_in6*)to;
  memset(to, 0, sizeof *to);
  if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons((uint16_t)port);
    return sizeof *four;
  }
  if (inet_pton(AF_INET6, text, &six->sin6_addr) != 1) fail("%s is not an address", text);
  six->sin6_family = AF_INET6;
  six->sin6_port = htons((uint16_t)port);
  return sizeof *six;
}

/* Sending */

struct path {
  int fd;
  struct segment posted[MAX_POSTED]; /* the first is being written */
  uint32_t count;
  size_t written; /* of the first: head and payload */
  uint64_t bytes; /* posted so far */
  uint64_t acked, last_acked, busy_ns, last_sample_ns;
  uint64_t rate; /* bytes acknowledged over busy time, the last one measured */
  uint32_t srtt_us, min_rtt_us;
};

struct sender {
  struct ringfold_agent agent;
  struct ringfold_split split;
  struct path path[MAX_PATHS];
  uint32_t paths;
  int flow;
  uint64_t total, posted, limit_bytes_s, began_ns;
  uint64_t by_hint, by_rates;
  char shown[160];
};

static void connect_path(struct path* path, const char* local, const char* remote, int port) {
  struct sockaddr_storage address;
  const int on = 1;
  socklen_t bytes = address_of(&address, local, 0);
  path->fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (path->fd < 0 || bind(path->fd, (const struct sockaddr*)&address, bytes) != 0) fail("cannot bind %s", local);
  bytes = address_of(&address, remote, port);
  if (connect(path->fd, (const struct sockaddr*)&address, bytes) != 0) fail("cannot connect to %s", remote);
  setsockopt(path->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ioctl(path->fd, FIONBIO, &on);
}

/* Rates are the growth of acknowledged bytes over the time in which there was something to send. */
static void measure(struct path* path, uint64_t now_ns) {
  struct tcp_info info;
  socklen_t bytes = sizeof info;
  memset(&info, 0, sizeof info);
  if (getsockopt(path->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return;
  if (path->count > 0 || info.tcpi_unacked > 0) path->busy_ns += now_ns - path->last_sample_ns;
  path->last_sample_ns = now_ns;
  path->acked = info.tcpi_bytes_acked;
  path->srtt_us = info.tcpi_rtt;
  path->min_rtt_us = info.tcpi_min_rtt;
}

static void report(struct sender* sender) {
  uint64_t rates[MAX_PATHS];
  uint32_t srtt_us[MAX_PATHS], min_rtt_us[MAX_PATHS], each;
  for (each = 0; each < sender->paths; ++each) {
    struct path* path = &sender->path[each];
    const uint64_t bytes = path->acked - path->last_acked;
    rates[each] = path->busy_ns > 0 && bytes > 0 ? bytes * 1000000 / (path->busy_ns / 1000 + 1) : 0;
    if (rates[each] > 0) path->rate = rates[each];
    srtt_us[each] = path->srtt_us;
    min_rtt_us[each] = path->min_rtt_us;
    path->last_acked = path->acked;
    path->busy_ns = 0;
  }
  ringfold_agent_report(&sender->agent, sender->flow, rates, srtt_us, min_rtt_us); /* [agent] 4: what is measured */
}

/* The split without advice: by the measured rates; equal while none is known. */
static void split_by_rates(const struct sender* sender, struct ringfold_hint* hint) {
  uint64_t sum = 0, left = RINGFOLD_SHARE_ALL;
  uint32_t each;
  memset(hint, 0, sizeof *hint);
  hint->paths = (uint16_t)sender->paths;
  for (each = 0; each < sender->paths; ++each) sum += sender->path[each].rate + 1;
  for (each = 1; each < sender->paths; ++each) {
    hint->shares[each] = (uint16_t)((sender->path[each].rate + 1) * RINGFOLD_SHARE_ALL / sum);
    left -= hint->shares[each];
  }
  hint->shares[0] = (uint16_t)left;
}

static void show(struct sender* sender, const struct ringfold_hint* hint, int is_hint) {
  char line[sizeof sender->shown];
  size_t at = (size_t)snprintf(line, sizeof line, "%s", is_hint ? "hint" : "local");
  uint32_t each;
  for (each = 0; each < hint->paths && at + 12 < sizeof line; ++each) {
    const char* held = hint->backpressure >> each & 1u ? " held" : "";
    at +=
        (size_t)snprintf(line + at, sizeof line - at, " %u %%%s", (hint->shares[each] * 100u + 32767u) / 65535u, held);
  }
  if (strcmp(line, sender->shown) == 0) return;
  memcpy(sender->shown, line, sizeof line);
  printf("%.3f s: %s\n", (double)(ringfold_hints_now() - sender->began_ns) / 1e9, line);
  fflush(stdout);
}

static void post(struct sender* sender, uint64_t now_ns) {
  while (sender->posted < sender->total) {
    const uint64_t left = sender->total - sender->posted;
    const uint32_t bytes = left < SEGMENT ? (uint32_t)left : SEGMENT;
    struct ringfold_hint hint;
    struct path* path;
    struct segment* segment;
    uint32_t each, full = 0;
    int is_hint;
    const uint64_t allowed = (now_ns - sender->began_ns) / 1000 * sender->limit_bytes_s / 1000000;
    if (sender->limit_bytes_s > 0 && sender->posted > allowed) return;
    for (each = 0; each < sender->paths; ++each) full += sender->path[each].count == MAX_POSTED;
    if (full > 0) return; /* what is posted next might be for that path */
    /* [agent] 3: one read of shared memory per request */
    is_hint = ringfold_agent_hint(&sender->agent, sender->flow, &hint) == RINGFOLD_HINT_READ;
    if (!is_hint) split_by_rates(sender, &hint);
    path = &sender->path[ringfold_split_next(&sender->split, &hint, bytes)];
    segment = &path->posted[path->count++];
    segment->offset = sender->posted;
    segment->total = sender->total;
    segment->bytes = bytes;
    segment->reserved = 0;
    path->bytes += bytes;
    sender->posted += bytes;
    *(is_hint ? &sender->by_hint : &sender->by_rates) += 1;
    show(sender, &hint, is_hint);
  }
}

static void write_path(struct path* path) {
  static uint8_t frame[sizeof(struct segment) + SEGMENT];
  while (path->count > 0) {
    const struct segment* first = &path->posted[0];
    const size_t size = sizeof *first + first->bytes;
    ssize_t done;
    memcpy(frame, first, sizeof *first);
    fill(frame + sizeof *first, first->offset, first->bytes);
    done = send(path->fd, frame + path->written, size - path->written, MSG_NOSIGNAL);
    if (done < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (done < 0) fail("a path is broken");
    path->written += (size_t)done;
    if (path->written < size) return;
    path->written = 0;
    path->count -= 1;
    memmove(&path->posted[0], &path->posted[1], path->count * sizeof path->posted[0]);
  }
}

static void send_all(struct sender* sender) {
  uint64_t polled_ns = 0, reported_ns = 0;
  for (;;) {
    struct pollfd ready[MAX_PATHS];
    const uint64_t now_ns = ringfold_hints_now();
    uint32_t each, unwritten = 0;
    ringfold_agent_look(&sender->agent, now_ns); /* [agent] 2: once per turn, and now and then all the rest */
    if (now_ns - polled_ns >= POLL_NS) {
      ringfold_agent_poll(&sender->agent, now_ns);
      for (each = 0; each < sender->paths; ++each) measure(&sender->path[each], now_ns);
      polled_ns = now_ns;
    }
    if (now_ns - reported_ns >= REPORT_NS) {
      report(sender);
      reported_ns = now_ns;
    }
    post(sender, now_ns);
    for (each = 0; each < sender->paths; ++each) {
      write_path(&sender->path[each]);
      unwritten += sender->path[each].count;
      ready[each].fd = sender->path[each].fd;
      ready[each].events = sender->path[each].count > 0 ? POLLOUT : 0;
    }
    if (unwritten == 0 && sender->posted == sender->total) return;
    (void)poll(ready, sender->paths, 1);
  }
}

static int send_main(struct sender* sender, int port, char** pairs) {
  struct ringfold_agent_flow flow;
  uint32_t each;
  uint64_t took_ns;
  char answer;
  for (each = 0; each < sender->paths; ++each) {
    char* remote = strchr(pairs[each], ',');
    if (remote == 0) fail("%s is not LOCAL,REMOTE", pairs[each]);
    *remote++ = 0;
    if (each == 0 && ringfold_agent_flow_init(&flow, pairs[0], remote) != RINGFOLD_AGENT_OK) fail("not an address");
    if (ringfold_agent_flow_add_path(&flow, pairs[each], remote) != RINGFOLD_AGENT_OK) fail("not an address");
    connect_path(&sender->path[each], pairs[each], remote, port);
  }
  sender->began_ns = ringfold_hints_now();
  for (each = 0; each < sender->paths; ++each) sender->path[each].last_sample_ns = sender->began_ns;
  sender->flow = ringfold_agent_register(&sender->agent, &flow); /* [agent] 1: register; nothing waits for it */
  if (sender->flow < 0) fail("a flow has 2 to %u paths", MAX_PATHS);
  send_all(sender);
  for (each = 0; each < sender->paths; ++each) shutdown(sender->path[each].fd, SHUT_WR);
  for (each = 0; each < sender->paths; ++each) { /* the receiver closes when it has everything */
    const int off = 0;
    ioctl(sender->path[each].fd, FIONBIO, &off);
    while (recv(sender->path[each].fd, &answer, 1, 0) > 0) {
    }
  }
  took_ns = ringfold_hints_now() - sender->began_ns;
  printf("sent %.1f MB in %.2f s, %u requests by hints, %u by own rates:", (double)sender->total / 1e6,
         (double)took_ns / 1e9, (unsigned)sender->by_hint, (unsigned)sender->by_rates);
  for (each = 0; each < sender->paths; ++each)
    printf(" %.1f %%", 100.0 * (double)sender->path[each].bytes / (double)sender->total);
  puts("");
  ringfold_agent_close(&sender->agent);
  return 0;
}

/* Receiving */

static uint64_t received_total, received_bytes;
static uint8_t* received_segments;

static void receive_segment(const struct segment* head, const uint8_t* payload) {
  static uint8_t wanted[SEGMENT];
  if (received_segments == 0) {
    if (head->total == 0 || head->total > (uint64_t)MAX_MB << 20) fail("not a sender");
    received_total = head->total;
    received_segments = (uint8_t*)calloc(received_total / SEGMENT + 1, 1);
    if (received_segments == 0) fail("no memory");
  }
  if (head->total != received_total || head->offset >= received_total) fail("not a sender");
  if (received_segments[head->offset / SEGMENT]++ != 0) fail("a segment arrived twice");
  fill(wanted, head->offset, head->bytes);
  if (memcmp(wanted, payload, head->bytes) != 0) fail("a segment is damaged");
  received_bytes += head->bytes;
}

struct inbound {
  int fd;
  uint8_t* frame;
  size_t filled;
  uint64_t bytes;
};

/* Reads what is there; 0 at the end. */
static int receive_path(struct inbound* path) {
  struct segment head;
  size_t wanted = sizeof head;
  ssize_t got;
  if (path->filled >= sizeof head) {
    memcpy(&head, path->frame, sizeof head);
    if (head.bytes > SEGMENT) fail("not a sender");
    wanted = sizeof head + head.bytes;
  }
  got = recv(path->fd, path->frame + path->filled, wanted - path->filled, 0);
  if (got <= 0) return 0;
  path->filled += (size_t)got;
  if (path->filled < wanted || wanted == sizeof head) return 1;
  receive_segment(&head, path->frame + sizeof head);
  path->bytes += head.bytes;
  path->filled = 0;
  return 1;
}

static int receive_main(int port, char** addresses, uint32_t paths) {
  struct inbound inbound[MAX_PATHS];
  struct pollfd ready[MAX_PATHS];
  uint32_t each, open = paths;
  int listening[MAX_PATHS];
  const int on = 1;
  for (each = 0; each < paths; ++each) {
    struct sockaddr_storage address;
    const socklen_t bytes = address_of(&address, addresses[each], port);
    listening[each] = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listening[each], SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listening[each], (const struct sockaddr*)&address, bytes) != 0 || listen(listening[each], 1) != 0)
      fail("cannot listen at %s", addresses[each]);
  }
  puts("listening");
  fflush(stdout);
  for (each = 0; each < paths; ++each) {
    memset(&inbound[each], 0, sizeof inbound[each]);
    inbound[each].fd = accept(listening[each], 0, 0);
    inbound[each].frame = (uint8_t*)malloc(sizeof(struct segment) + SEGMENT);
    if (inbound[each].fd < 0 || inbound[each].frame == 0) fail("cannot accept");
    ready[each].fd = inbound[each].fd;
    ready[each].events = POLLIN;
  }
  while (open > 0) {
    if (poll(ready, paths, -1) < 0) fail("poll");
    for (each = 0; each < paths; ++each) {
      if (ready[each].fd < 0 || ready[each].revents == 0 || receive_path(&inbound[each])) continue;
      ready[each].fd = -1;
      open -= 1;
    }
  }
  printf("received %.1f MB, %s:", (double)received_bytes / 1e6,
         received_bytes == received_total ? "whole" : "not whole");
  for (each = 0; each < paths; ++each) {
    printf(" %llu", (unsigned long long)inbound[each].bytes);
    free(inbound[each].frame);
    close(inbound[each].fd);
  }
  puts("");
  free(received_segments);
  return received_bytes == received_total ? 0 : 1;
}

static struct sender the_sender;

int main(int count, char** arguments) {
  const char* directory = 0;
  uint64_t mb = 100, mbit = 0, requests = 0;
  uint32_t paths = 0;
  int at;
  errno = 0;
  if (count < 4)
    fail(
        "usage: split receive PORT ADDRESS... | split send PORT LOCAL,REMOTE... [--mb N] [--mbit N] "
        "[--requests-per-hint N] [--dir DIRECTORY]");
  for (at = 3; at < count; ++at) {
    if (strncmp(arguments[at], "--", 2) != 0) {
      if (paths == MAX_PATHS) fail("too many paths");
      arguments[3 + paths++] = arguments[at];
      continue;
    }
    if (at + 1 == count) fail("%s needs a value", arguments[at]);
    if (strcmp(arguments[at], "--mb") == 0) mb = strtoull(arguments[at + 1], 0, 10);
    else if (strcmp(arguments[at], "--mbit") == 0) mbit = strtoull(arguments[at + 1], 0, 10);
    else if (strcmp(arguments[at], "--requests-per-hint") == 0) requests = strtoull(arguments[at + 1], 0, 10);
    else if (strcmp(arguments[at], "--dir") == 0) directory = arguments[at + 1];
    else fail("there is no option %s", arguments[at]);
    at += 1;
  }
  if (paths == 0) fail("no paths: give an ADDRESS to receive at, or LOCAL,REMOTE to send on, for each");
  if (strcmp(arguments[1], "receive") == 0) return receive_main(atoi(arguments[2]), arguments + 3, paths);
  if (strcmp(arguments[1], "send") != 0 || mb == 0 || mb > MAX_MB) fail("send or receive, and up to %u MB", MAX_MB);
  if (paths < 2) fail("a flow has 2 to %u paths", MAX_PATHS);
  if (ringfold_agent_open(&the_sender.agent, directory, "split") != RINGFOLD_AGENT_OK) fail("a directory too long");
  ringfold_agent_set_requests_per_hint(&the_sender.agent, (uint32_t)requests); /* 0: as the agent advises */
  the_sender.paths = paths;
  the_sender.total = mb << 20;
  the_sender.limit_bytes_s = mbit * 125000;
  return send_main(&the_sender, atoi(arguments[2]), arguments + 3);
}
