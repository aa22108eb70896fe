// SPDX-License-Identifier: Apache-2.0
//
// StepMaker is what a landing needs of the store of a daemon: that saves are put into memory,
// made durable and found again, and that the daemon hears what became of them.
//
// Thread safety: all methods may be called concurrently, those for one save by one thread.
// Lifetime: it must outlive the landing.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/records/records.h"
#include "core/store/blob_stream.h"
#include "snapshot/landing/save_bytes.h"

namespace ckptfs {

class StepMaker {
 public:
  virtual ~StepMaker() = default;

  struct Entered {
    StepRecord record;
    bool stored = false;  // by an earlier daemon
  };
  // Puts a save of which all ranks are here into memory, and shows it.  A save that may be stored
  // is looked for first.  BLOCKS: on the store.
  virtual Result<Entered> Enter(const std::shared_ptr<SaveBytes>& save) = 0;
  // Makes a step that was entered durable.  BLOCKS: on the store.
  virtual Result<StepRecord> Persist(const StepRecord& record) = 0;
  // Shows a step that was entered no more.
  virtual void Release(const StepRecord& record) = 0;
  // Returns the step that an earlier daemon has stored with this part.  BLOCKS: on the store.
  virtual Result<std::optional<StepRecord>> FindStored(const PartAgain& part) = 0;
  // Begins to write a rank's file to the store before it is whole (Store::StreamBlob); null where
  // it does not.
  virtual std::shared_ptr<BlobStream> Stream(const std::string& path, uint64_t bytes,
                                             std::weak_ptr<const void> owner) = 0;

  struct News {
    enum class What {
      kPersisted,  // `record` is durable, of ranks that were all here
      kPublished,  // `record` is durable, and this daemon has published it for several
      kHeard,      // `record` is durable, and another daemon has published it
      kInVain,     // something was written that no step needs, or another daemon left it
    };
    What what;
    StepRecord record = {};
  };
  virtual void Tell(const News& news) = 0;
};

}  // namespace ckptfs
