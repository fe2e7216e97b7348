// Ranks are processes of one host that compute a model together: each has some columns of every matrix, and they
// exchange products through shared memory. No sum is cut, so its bits do not depend on how many ranks there are. The
// plain form of an exchange is `torch.cat` of all ranks' columns.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/buffer.h"
#include "base/ref.h"
#include "base/tensor.h"

namespace twostep::ranks {

// The shared memory of all ranks. Each writes into two parts of its own, in turn, and counts what it has written:
// whoever reads the count `n` of all others may overwrite what they wrote before, since they count up only after they
// have read it. One thread of each rank calls, and all ranks call the same, in the same order.
class Exchange {
 public:
  // Maps the memory behind a descriptor, of which `memory_size` bytes are used. A rank that others wait for longer than
  // `timeout_s` has failed.
  Exchange(int64_t descriptor, int64_t rank, int64_t size, int64_t part_bytes, double timeout_s);
  Exchange(const Exchange&) = delete;
  ~Exchange();

  static int64_t memory_size(int64_t size, int64_t part_bytes);

  // Makes all waiting of all ranks fail, now and in future. Any thread may call it.
  void abort();

  // x [T, own columns] -> [T, all columns], where those of rank r are [starts[r], starts[r + 1]). Throws if a rank has
  // failed.
  Tensor gather(const Tensor& x, const std::vector<int64_t>& starts, const Buffer& out);

  const int64_t rank, size;

 private:
  // In cache lines of their own: what one rank counts, the others read all the time.
  struct alignas(64) Counter {
    std::atomic<uint32_t> written;
    alignas(64) std::atomic<uint32_t> sleepers;
  };

  struct Header {
    alignas(64) std::atomic<uint32_t> is_aborted;
  };

  static int64_t header_size(int64_t size);
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Counter& counter_of(int64_t rank) const;
  char* part_of(int64_t rank) const;
  void publish();
  void wait_for(int64_t rank) const;
  void check_patience(int64_t rank, double waited_s) const;

  const int64_t part_bytes_;
  const double timeout_s_;
  char* memory_;
  uint32_t count_ = 0;  // of what this rank has written
};

// Where each rank's columns begin, and at last how many there are.
struct Gather {
  Ref<Exchange> exchange;
  std::vector<int64_t> starts;

  Gather(Ref<Exchange> exchange, std::vector<int64_t> starts);

  Tensor operator()(const Tensor& x, const Buffer& out) const { return exchange->gather(x, starts, out); }
};

using OptionalGather = std::optional<Ref<Gather>>;

}  // namespace twostep::ranks
