/* Loaded into a process by LD_PRELOAD: all its clocks are shifted by as many seconds as the file CLOCK_SHIFT says, which
   may change at any time. Waits that name a moment are shifted back, because the kernel's clock is as it was. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift_s;

__attribute__((constructor)) static void open_shift(void) {
    const char *path = getenv("CLOCK_SHIFT");
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *there = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift_s, PROT_READ, MAP_SHARED, file, 0);
    if (there != MAP_FAILED) shift_s = there;
    if (file >= 0) close(file);
}

static long long shift(void) { return shift_s ? *shift_s : 0; }

static struct timespec back(const struct timespec *until) {
    struct timespec real = *until;
    real.tv_sec -= shift();
    return real;
}

static void *next(const char *name) {
    /* An old version of the same name would have another layout. */
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.30", "GLIBC_2.17", "GLIBC_2.3.2", "GLIBC_2.2.5"};
    for (unsigned i = 0; i < sizeof versions / sizeof *versions; i++) {
        void *found = dlvsym(RTLD_NEXT, name, versions[i]);
        if (found) return found;
    }
    return dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    const int result = (int)syscall(SYS_clock_gettime, clock, now);
    const int counts_cpu = clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID || clock < 0;
    if (result == 0 && !counts_cpu) now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real) real = next("sem_clockwait");
    const struct timespec moment = back(until);
    return real(semaphore, clock, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = next("sem_timedwait");
    const struct timespec moment = back(until);
    return real(semaphore, &moment);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = next("pthread_cond_timedwait");
    const struct timespec moment = back(until);
    return real(condition, mutex, &moment);
}
