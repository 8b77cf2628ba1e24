/* What the C of a design is built on. */

#define _GNU_SOURCE

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

/* Lanes do not see each other's results of the same loop. A loop over few is not worth code. */
#ifdef __clang__
#define LANES _Pragma("clang loop vectorize(assume_safety) interleave(disable)")
#define FEW _Pragma("clang loop vectorize(disable) unroll(disable)")
#else
#define LANES _Pragma("GCC ivdep")
#define FEW
#endif

#define NOINLINE __attribute__((noinline))
#define ALWAYS_INLINE inline __attribute__((always_inline))

#ifdef __x86_64__
#define RELAX __builtin_ia32_pause()
#else
#define RELAX
#endif

/* Memory for a state; a large one in large pages, where there are any. */
static inline void *room(size_t size) {
    size_t page = size > 1 << 22 ? 1 << 21 : 64;
    size = (size + page - 1) / page * page;
    void *p = aligned_alloc(page, size);
#ifdef MADV_HUGEPAGE
    if (p && page > 64) madvise(p, size, MADV_HUGEPAGE);
#endif
    return p;
}

/* Choices without branches: both sides are values already. */
static inline u32 sel32(u32 c, u32 a, u32 b) { return c ? a : b; }
static inline u64 sel64(u32 c, u64 a, u64 b) { return c ? a : b; }

/* Numbers of more than 64 bits: little-endian arrays of words. */

static inline u64 w_get(const u64 *a, int n, i64 at) {
    i64 k = at >> 6, s = at & 63;
    u64 low = k >= 0 && k < n ? a[k] : 0, high = k + 1 >= 0 && k + 1 < n ? a[k + 1] : 0;
    return s ? low >> s | high << (64 - s) : low;
}

static inline void w_shift(u64 *y, int ny, const u64 *a, int na, i64 right) {
    for (int i = 0; i < ny; ++i) y[i] = w_get(a, na, 64 * (i64)i + right);
}

/* y = a + b, or a - b */
static inline void w_add(u64 *y, const u64 *a, const u64 *b, int n, int subtract) {
    u64 carry = subtract;
    for (int i = 0; i < n; ++i) {
        u64 c = subtract ? ~b[i] : b[i], s = a[i] + c, t = s + carry;
        carry = (s < c) | (t < s);
        y[i] = t;
    }
}

static inline int w_less(const u64 *a, const u64 *b, int n) {
    for (int i = n - 1; i >= 0; --i)
        if (a[i] != b[i]) return a[i] < b[i];
    return 0;
}

static inline void w_mul(u64 *y, const u64 *a, const u64 *b, int n) {
    for (int i = 0; i < n; ++i) y[i] = 0;
    for (int i = 0; i < n; ++i) {
        u64 carry = 0;
        for (int j = 0; i + j < n; ++j) {
            unsigned __int128 t = (unsigned __int128)a[i] * b[j] + y[i + j] + carry;
            y[i + j] = (u64)t;
            carry = (u64)(t >> 64);
        }
    }
}

/* Quotient and remainder; of a division by 0 they are 0 and a. */
static inline void w_divmod(u64 *q, u64 *r, const u64 *a, const u64 *b, int n) {
    u64 any = 0;
    for (int i = 0; i < n; ++i) any |= b[i], q[i] = r[i] = 0;
    if (!any) {
        memcpy(r, a, 8 * n);
        return;
    }
    for (int bit = 64 * n - 1; bit >= 0; --bit) {
        u64 out = r[n - 1] >> 63;
        for (int i = n - 1; i > 0; --i) r[i] = r[i] << 1 | r[i - 1] >> 63;
        r[0] = r[0] << 1 | (a[bit / 64] >> bit % 64 & 1);
        if (out || !w_less(r, b, n)) {
            w_add(r, r, b, n, 1);
            q[bit / 64] |= (u64)1 << bit % 64;
        }
    }
}

/* The same, signed, rounded down (floor) or toward zero; numbers are extended to n words. */
static inline void w_sdivmod(u64 *q, u64 *r, const u64 *a, const u64 *b, int n, int floor) {
    u64 zero[n], x[n], y[n];
    memset(zero, 0, 8 * n);
    int na = a[n - 1] >> 63, nb = b[n - 1] >> 63;
    na ? w_add(x, zero, a, n, 1) : memcpy(x, a, 8 * n);
    nb ? w_add(y, zero, b, n, 1) : memcpy(y, b, 8 * n);
    w_divmod(q, r, x, y, n);
    if (!memcmp(b, zero, 8 * n)) {
        memcpy(r, a, 8 * n);
        return;
    }
    if (na != nb) w_add(q, zero, q, n, 1);
    if (na) w_add(r, zero, r, n, 1);
    if (floor && na != nb && memcmp(r, zero, 8 * n)) {
        u64 one[n];
        memset(one, 0, 8 * n);
        one[0] = 1;
        w_add(q, q, one, n, 1);
        w_add(r, r, b, n, 0);
    }
}
