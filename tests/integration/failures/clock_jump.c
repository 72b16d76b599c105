/* Preloaded into a service: its wall clock runs ahead by the seconds in CLOCK_OFFSET_FILE (a 64-bit number, read anew each
 * time); monotonic clocks stay as they are, as when a machine's clock is set. Debian 12's libfaketime (0.9.10) cannot do
 * that: under it the sleep of Python 3.11 ends with EINVAL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long long *offset;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    void *page = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    real = dlsym(RTLD_NEXT, "clock_gettime");
}
int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
