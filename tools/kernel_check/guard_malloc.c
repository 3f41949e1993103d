/* A guard allocator for tests of compiled kernels, loaded with LD_PRELOAD.
 *
 * After guard_enable(1), every allocation of MIN_BYTES or more gets pages of its own that end at an unmapped page, and
 * is filled with bytes that are NaN in float32 and bfloat16. Freed pages become inaccessible and are never reused, so a
 * read through a stale address, or beyond the end, is a segmentation fault instead of a wrong value. Addresses come from
 * one reserved range, which also tells free() which allocations are guarded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define RANGE ((size_t)1 << 44)
#define MIN_BYTES ((size_t)32)
#define FILL 0xFF

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic int enabled;
static _Atomic uintptr_t next_page;
static uintptr_t first_page;

static int guarded(const void *p) { return first_page && (uintptr_t)p - first_page < RANGE; }

void guard_enable(int on) {
    if (!first_page) {
        void *range = mmap(NULL, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) return;
        first_page = (uintptr_t)range;
        atomic_store(&next_page, first_page);
    }
    atomic_store(&enabled, on);
}

/* How many bytes of addresses were handed out: zero means that the guard is not in force. */
size_t guard_used(void) { return first_page ? atomic_load(&next_page) - first_page : 0; }

/* The first page of an allocation holds its size and the number of its pages; the data ends where the last page ends. */
static void *guard_alloc(size_t size, size_t align, int fill) {
    if (align < 16) align = 16;
    size_t pages = 1 + (size + align + PAGE - 1) / PAGE;
    uintptr_t start = atomic_fetch_add(&next_page, (pages + 1) * PAGE);
    if (start + (pages + 1) * PAGE > first_page + RANGE) return NULL;
    /* The kernel limits how many mappings a process has. */
    if (mprotect((void *)start, pages * PAGE, PROT_READ | PROT_WRITE)) return __libc_memalign(align, size);
    uintptr_t data = (start + pages * PAGE - size) & ~(uintptr_t)(align - 1);
    size_t *head = (size_t *)(start);
    head[0] = size;
    head[1] = pages;
    memset((void *)data, fill, size);
    /* The word before the data says where the head is. */
    ((uintptr_t *)data)[-1] = start;
    return (void *)data;
}

static size_t guard_size(void *p) { return ((size_t *)((uintptr_t *)p)[-1])[0]; }

static void guard_free(void *p) {
    uintptr_t start = ((uintptr_t *)p)[-1];
    size_t bytes = ((size_t *)start)[1] * PAGE;
    madvise((void *)start, bytes, MADV_DONTNEED);
    mprotect((void *)start, bytes, PROT_NONE);
}

static int wanted(size_t size) { return size >= MIN_BYTES && atomic_load(&enabled); }

void *malloc(size_t size) { return wanted(size) ? guard_alloc(size, 16, FILL) : __libc_malloc(size); }

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    return wanted(bytes) ? guard_alloc(bytes, 16, 0) : __libc_calloc(count, size);
}

void *memalign(size_t align, size_t size) {
    return wanted(size) ? guard_alloc(size, align, FILL) : __libc_memalign(align, size);
}

void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

int posix_memalign(void **out, size_t align, size_t size) {
    *out = memalign(align, size);
    return *out ? 0 : ENOMEM;
}

void free(void *p) {
    if (!p) return;
    if (guarded(p))
        guard_free(p);
    else
        __libc_free(p);
}

void *realloc(void *p, size_t size) {
    if (p && guarded(p)) {
        void *moved = malloc(size);
        if (!moved) return NULL;
        size_t old = guard_size(p);
        memcpy(moved, p, old < size ? old : size);
        guard_free(p);
        return moved;
    }
    return __libc_realloc(p, size);
}

size_t malloc_usable_size(void *p) {
    static size_t (*real)(void *);
    if (p && guarded(p)) return guard_size(p);
    if (!real) real = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return real(p);
}
