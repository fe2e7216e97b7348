// How ranks exchange columns: copies into shared memory and out of it, and counters that are waited for.

#include "ranks/exchange.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep::ranks {
namespace {

constexpr int64_t kLine = 64, kPage = 4096;
constexpr int64_t kGrainBytes = 1 << 16;      // below which waking another thread costs more than it saves
constexpr long kLongestSleep = 50'000'000;    // nanoseconds until a sleeper looks whether all ranks are given up

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a counter is shared between processes");

// Sleeps while the number is the one that was seen, but not for long. Another process may wake this one.
void sleep_on(std::atomic<uint32_t>& number, uint32_t seen) {
  const timespec limit{0, kLongestSleep};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&number), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& number) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&number), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Copies rows of `row_bytes` between matrices whose rows begin `from_stride` and `to_stride` bytes apart.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t row_bytes, int64_t count) {
  if (row_bytes == 0) return;
  run_ranges(count, divide_up(kGrainBytes, row_bytes), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, row_bytes);
  });
}

}  // namespace

Exchange::Exchange(int64_t descriptor, int64_t rank, int64_t size, int64_t part_bytes, double timeout_s)
    : rank(rank), size(size), part_bytes_(divide_up(part_bytes, kPage) * kPage), timeout_s_(timeout_s) {
  TWOSTEP_CHECK(0 <= rank && rank < size, "a rank is below the number of ranks");
  void* mapped = mmap(nullptr, memory_size(size, part_bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                      static_cast<int>(descriptor), 0);
  TWOSTEP_CHECK(mapped != MAP_FAILED, "the memory of all ranks cannot be mapped: ", std::strerror(errno));
  memory_ = static_cast<char*>(mapped);
}

Exchange::~Exchange() { munmap(memory_, memory_size(size, part_bytes_)); }

int64_t Exchange::header_size(int64_t size) {
  return divide_up(static_cast<int64_t>(kLine + size * sizeof(Counter)), kPage) * kPage;
}

int64_t Exchange::memory_size(int64_t size, int64_t part_bytes) {
  return header_size(size) + 2 * size * divide_up(part_bytes, kPage) * kPage;
}

Exchange::Counter& Exchange::counter_of(int64_t rank) const {
  return reinterpret_cast<Counter*>(memory_ + kLine)[rank];
}

// The part that a rank writes as its `count_`th.
char* Exchange::part_of(int64_t rank) const {
  return memory_ + header_size(size) + (2 * rank + count_ % 2) * part_bytes_;
}

void Exchange::abort() { header().is_aborted.store(1); }

void Exchange::publish() {
  Counter& own = counter_of(rank);
  own.written.store(count_);  // before the sleepers are counted, who count themselves before they look at it
  if (own.sleepers.load() > 0) wake_all(own.written);
}

void Exchange::check_patience(int64_t rank, double waited_s) const {
  TWOSTEP_CHECK(header().is_aborted.load() == 0, "the ranks have been given up, since one of them failed");
  TWOSTEP_CHECK(waited_s < timeout_s_, "rank ", rank, " has not answered for ", static_cast<int64_t>(waited_s), " s");
}

void Exchange::wait_for(int64_t rank) const {
  Counter& other = counter_of(rank);
  const auto start = std::chrono::steady_clock::now();
  const auto has_written = [&] { return static_cast<int32_t>(other.written.load() - count_) >= 0; };
  wait_until(has_written, [&] {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    check_patience(rank, waited.count());
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.written.load();
    if (!has_written()) sleep_on(other.written, seen);
    other.sleepers.fetch_sub(1);
  });
}

Tensor Exchange::gather(const Tensor& x, const std::vector<int64_t>& starts, const Buffer& out) {
  const int64_t element = x.element_size(), num_rows = x.size(0), own_bytes = x.size(1) * element;
  TWOSTEP_CHECK(x.dim() == 2 && x.size(1) == starts[rank + 1] - starts[rank], "rows do not have this rank's columns");
  int64_t widest = 1;
  for (int64_t r = 0; r < size; ++r) widest = std::max(widest, (starts[r + 1] - starts[r]) * element);
  TWOSTEP_CHECK(widest <= part_bytes_, "a row of ", widest, " bytes does not fit into the memory of a rank");
  const Tensor own = x.contiguous();
  const Tensor& result = out.get({num_rows, starts[size]}, x);
  const auto* from = static_cast<const char*>(own.const_data_ptr());
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  const int64_t stride = starts[size] * element, rows_at_once = part_bytes_ / widest;
  for (int64_t first = 0; first < num_rows; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, num_rows - first);
    ++count_;
    copy_rows(from + first * own_bytes, own_bytes, part_of(rank), own_bytes, own_bytes, count);
    publish();
    char* const rows = to + first * stride;
    copy_rows(from + first * own_bytes, own_bytes, rows + starts[rank] * element, stride, own_bytes, count);
    for (int64_t i = 1; i < size; ++i) {
      const int64_t other = (rank + i) % size, bytes = (starts[other + 1] - starts[other]) * element;
      wait_for(other);
      copy_rows(part_of(other), bytes, rows + starts[other] * element, stride, bytes, count);
    }
  }
  return result;
}

Gather::Gather(Ref<Exchange> exchange, std::vector<int64_t> starts)
    : exchange(std::move(exchange)), starts(std::move(starts)) {
  TWOSTEP_CHECK(static_cast<int64_t>(this->starts.size()) == this->exchange->size + 1 && this->starts.front() == 0 &&
                    std::is_sorted(this->starts.begin(), this->starts.end()),
                "each rank's columns begin where those of the one before end");
}

}  // namespace twostep::ranks
