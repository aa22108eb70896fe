// SPDX-License-Identifier: Apache-2.0
//
// OpenFiles is what is open and how it is served: plans, the backings that the
// kernel reads instead of us, the memory they are filled into.
//
// Thread safety: all methods may be called concurrently; no lock is held across
// I/O.
// Lifetime: options, resolver and counters must outlive it.  Members are destroyed
// in reverse order: handles and plans before the materialiser.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/lru.h"
#include "fs/handover.h"
#include "fs/serve/counters.h"
#include "fs/serve/handle_table.h"
#include "fs/serve/live_opens.h"
#include "fs/serve/materialiser.h"
#include "fs/serve/page_reserve.h"
#include "fs/serve/prepared_plan.h"
#include "fs/serve/serving.h"
#include "fs/tree/node.h"
#include "fs/tree/resolver.h"
#include "fs/types.h"

namespace ckptfs {

class OpenFiles {
 public:
  OpenFiles(const FilesystemOptions& options, const Resolver& resolver, Counters& counters);

  // Somebody looks at a file: it may be opened.
  void Expect(const Node& file);
  // The file's plan, whose sources are what was adopted; else kStale.
  Result<std::shared_ptr<const PreparedPlan>> Prepare(const Node& file);
  // BLOCKS: on filling, where the policy materialises.
  Result<OpenFile> Open(const Node& file);
  // A file whose content is `text`.
  Result<OpenFile> OpenText(InodeNumber inode, std::string text);
  // As Filesystem's.
  Result<size_t> Read(FileHandle handle, uint64_t offset, std::span<std::byte> out);
  std::optional<LentBytes> Lend(FileHandle handle, uint64_t offset, uint64_t length);
  void LentInVain(FileHandle handle);
  void Release(FileHandle handle);
  Result<OpenFile> Degrade(FileHandle handle);
  void DisablePassthrough(std::string_view reason);
  // As Filesystem's, of what is open.  `find`: the node of an inode.
  void HandOver(Handover& handover) const;
  using FindNode = std::function<Result<NodePtr>(InodeNumber)>;
  std::vector<TakenFile> TakeOver(const Handover& handover, const FindNode& find);
  // A caller that has a file open may ask about it, whatever became of its step.
  bool IsOpen(InodeNumber inode) { return live_.Peek(inode).has_value(); }

  // True if files are filled before they are read.
  bool MayFill() const;
  // Fills one file, or counts why not.  kExhausted if the budget ends.
  Status Warm(const Node& file, WarmReport& report);

  // Drops the files that are not open, of a step whose bytes lie elsewhere now or that went.
  void DropPlans(const Digest& manifest);
  void DropStep(const Digest& manifest);

  // For the status.
  bool passthrough() const { return passthrough_.load(); }
  size_t open() const { return handles_.size(); }
  size_t plans() const { return plans_.size(); }
  uint64_t plan_bytes() const { return plans_.weight(); }
  const Materialiser* materialiser() const { return materialiser_.get(); }  // null: no pool
  const PageReserve* reserve() const { return reserve_.get(); }             // null with it

 private:
  ServingChoice Choose(const Node& file, const PreparedPlan& plan, bool warming) const;
  // Null: streamed, for `*reason`.
  Result<std::shared_ptr<const Backing>> MakeBacking(const Node& file, const PreparedPlan& plan,
                                                     std::string* reason);
  OpenFile Describe(FileHandle handle, const OpenHandle& open) const;
  // The plan of a file that an earlier process opened; null if the file is not that one now.
  std::shared_ptr<const PreparedPlan> PrepareAgain(const KnownFile& file, const FindNode& find);
  // As PlanReader's.  Once as many bytes were read as the file has its sources are
  // looked at again: a reader of all of it is told of a change in the middle.
  static Result<size_t> Stream(const OpenHandle& open, uint64_t offset, std::span<std::byte> out);

  const FilesystemOptions& options_;
  const Resolver& resolver_;
  Counters& counters_;
  std::atomic<bool> passthrough_;
  std::unique_ptr<Materialiser> materialiser_;
  std::unique_ptr<PageReserve> reserve_;
  Lru<InodeNumber, std::shared_ptr<const PreparedPlan>> plans_;
  LiveOpens live_;
  HandleTable handles_;
};

}  // namespace ckptfs
