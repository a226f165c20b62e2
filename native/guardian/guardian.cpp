// The guardian of a peer: a process that tells the master when the kernel marks the peer's process as dead.
//
// usage: ringfold-guardian HEX    (descriptor 3: the page of the peer's Life, 4: a connection to the master)
//
// It sleeps on the word that the kernel marks (life.hpp). When the mark comes it sends the bytes of HEX to the master
// and ends; when the peer lets go, or the master closes the connection, it ends without a word. What the bytes mean,
// the peer knows, which has done the handshake.
//
// The file is C++ because a build needs no C compiler otherwise; it uses the C library and nothing else.
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <initializer_list>

namespace {

constexpr int life_fd = 3, master_fd = 4;
constexpr std::size_t page_bytes = 4096, max_message_bytes = 256;
// A connection that the master has closed is noticed after this long.
constexpr timespec look_every = {1, 0};

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// The number of bytes, 0 if it is no such text.
std::size_t bytes_of(const char* hex, unsigned char* out) {
  const std::size_t chars = std::strlen(hex);
  if (chars % 2 != 0 || chars / 2 > max_message_bytes) return 0;
  for (std::size_t i = 0; i < chars; i += 2) {
    const int high = digit(hex[i]), low = digit(hex[i + 1]);
    if (high < 0 || low < 0) return 0;
    out[i / 2] = static_cast<unsigned char>(high << 4 | low);
  }
  return chars / 2;
}

// Nothing of the process that started this one is kept: its pipes end when it ends, and Ctrl-C in its terminal is not
// for this one.
void leave_everything_behind() {
  if (::syscall(SYS_close_range, master_fd + 1, ~0U, 0) != 0) {
    for (int fd = master_fd + 1; fd < static_cast<int>(::sysconf(_SC_OPEN_MAX)); ++fd) ::close(fd);
  }
  const int null = ::open("/dev/null", O_RDWR);
  for (const int fd : {0, 1, 2}) null < 0 ? ::close(fd) : ::dup2(null, fd);
  if (null > 2) ::close(null);
  ::setsid();
  if (::chdir("/") != 0) return;
}

void stay_until_the_peer_ends() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM}) {
    ::signal(number, SIG_IGN);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

bool is_connected() {
  char ignored[256];
  ssize_t got = 0;
  while ((got = ::recv(master_fd, ignored, sizeof ignored, MSG_DONTWAIT)) > 0) {
  }
  return got < 0 && (errno == EAGAIN || errno == EINTR);
}

long futex(const std::uint32_t* word, int operation, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  unsigned char message[max_message_bytes];
  const std::size_t bytes = argc == 2 ? bytes_of(argv[1], message) : 0;
  if (bytes == 0) return 2;
  leave_everything_behind();
  stay_until_the_peer_ends();
  ::prctl(PR_SET_NAME, "ringfold-guard");
  const void* page = ::mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, life_fd, 0);
  if (page == MAP_FAILED) return 1;
  ::close(life_fd);
  const auto* word = static_cast<const std::uint32_t*>(page);
  for (;;) {
    const std::uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    const bool died = (now & FUTEX_OWNER_DIED) != 0;
    if (died) ::send(master_fd, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (died || (now & FUTEX_TID_MASK) == 0 || !is_connected()) break;
    futex(word, FUTEX_WAIT, now, &look_every);
  }
  // The kernel wakes one sleeper, and there may be two: one of an earlier master, which this may be.
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
  return 0;
}
