// SPDX-License-Identifier: Apache-2.0
//
// StepReaders answers programs that read steps which are only in memory
// (control_protocol.h's "read"): each has a connection and a thread.
//
// A step that became durable meanwhile goes on from the store, and a reader that asks
// nothing for a while holds no memory: so nobody who stops reading keeps a job from
// saving.
//
// Thread safety: Begin may be called concurrently.
// Lifetime: the catalogue must outlive it; the destructor ends its readers.

#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <string>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/store/step_catalogue.h"

namespace ckptfs {

class StepReaders {
 public:
  static constexpr size_t kMost = 64;

  // `idle`: after which a reader holds no memory.
  explicit StepReaders(StepCatalogue& catalogue,
                       std::chrono::milliseconds idle = std::chrono::seconds(5))
      : catalogue_(catalogue), idle_(idle) {}
  ~StepReaders();

  // Answers on the connection from now on, after `greeting`; it is taken only then.
  // kNotFound if no such step is in memory; kExhausted if there are too many readers.
  Status Begin(Descriptor& connection, const std::string& run, const std::string& id,
               const Layout& layout, const std::string& greeting);

 private:
  struct Reader {
    Descriptor connection;
    std::atomic<bool> over{false};
    std::thread thread;
  };
  void Serve(int connection, const StepRecord& record, const Layout& layout) const;

  StepCatalogue& catalogue_;
  const std::chrono::milliseconds idle_;
  Mutex mutex_;
  std::list<Reader> readers_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
