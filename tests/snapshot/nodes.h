// SPDX-License-Identifier: Apache-2.0
//
// Daemons of several nodes over one store, without receivers: each has a WorldCommit and
// says what its ranks handed over.
//
// Thread safety: none.

#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/commit/world_commit.h"
#include "core/io/memory_root.h"
#include "core/store/store.h"
#include "mount/daemon/snapshot_keeper.h"
#include "tests/snapshot/training.h"

namespace ckptfs::testing_support {

// Returns the capture of a rank at a step; the rank declares its own parameters.
inline Capture CaptureOf(uint64_t step, uint32_t rank, uint64_t elements = 1000) {
  RankMemory memory({3000, 5, elements});
  memory.Fill(static_cast<unsigned char>(step * 16 + rank));
  Capture capture = memory.Save(step, rank);
  for (const CapturedTensor& tensor : capture.tensors) {
    capture.parameters.push_back({tensor.parameter, "trainable"});
  }
  return capture;
}

inline std::string RankFileOf(uint64_t step, uint32_t rank, uint32_t world,
                              uint64_t elements = 1000) {
  const auto file = CaptureFile::Make(CaptureOf(step, rank, elements), rank, world);
  std::string bytes(file->bytes(), '\0');
  for (const bool lazy : {false, true}) {
    for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
      std::memcpy(bytes.data() + run.at, run.from, run.bytes);
    }
  }
  return bytes;
}

class Node {
 public:
  explicit Node(const std::shared_ptr<Storage>& storage, const std::string& directory = "",
                std::chrono::milliseconds beat = kBeat)
      : store(*Store::OpenOn(storage, true, directory)),
        commit(std::make_unique<WorldCommit>(*store, ModelOfRankFiles(), beat)) {}

  // `world` ranks of one job, of which these are here; a rank's life is 100 + its number.
  Result<JobWorld> Join(const std::vector<uint32_t>& ranks, uint32_t world, uint64_t lives = 100,
                        const std::string& job = "job") const {
    NodeRanks mine{"run", job, world, "", {}};
    for (const uint32_t rank : ranks) mine.ranks[rank] = lives + rank;
    return commit->Join(mine);
  }
  Status Prepare(const AttemptName& name, uint64_t step, const std::vector<uint32_t>& ranks,
                 uint32_t world, uint64_t elements = 1000) const {
    PreparedPart part{name, step, world, 0, {}};
    MemoryRoot bytes("handed over");
    for (const uint32_t rank : ranks) {
      auto text = std::make_shared<std::string>(RankFileOf(step, rank, world, elements));
      part.ranks.push_back({rank, text->size(), ChunkDigestsOf(*text)});
      CKPT_RETURN_IF_ERROR(
          bytes.Add(part.PathOf(rank), {std::as_bytes(std::span(*text))}, text, {}));
    }
    return commit->Prepare(std::move(part), bytes);
  }

  std::unique_ptr<Store> store;
  std::unique_ptr<WorldCommit> commit;
};

inline Digest LifeOfWorld(uint32_t world, uint64_t lives = 100) {
  std::map<uint32_t, uint64_t> ranks;
  for (uint32_t rank = 0; rank < world; ++rank) ranks[rank] = lives + rank;
  return LifeOf(ranks);
}

inline AttemptName AttemptOf(uint64_t attempt, uint32_t world, uint64_t lives = 100) {
  return {"run", "job", attempt, LifeOfWorld(world, lives)};
}

// The names below prepared/, but for those that are always there.
inline std::vector<std::string> RecordsIn(const Storage& storage) {
  auto names = *ListFilesBelow(storage, kPreparedFolder);
  std::erase_if(names, [](const std::string& name) {
    const auto flat = ParseFlatName(name);
    return flat && IsLayoutMark(*flat);
  });
  return names;
}

// All that the storage shows of the step is the ranks' files; whether it is there.
inline bool IsStepThere(const std::shared_ptr<Storage>& storage, const std::string& id,
                        uint64_t step, uint32_t world, uint64_t elements = 1000) {
  const auto store = *Store::OpenOn(storage);
  const auto record = store->Resolve("run", id);
  if (!record) return false;
  const auto loaded = store->Load(*record);
  EXPECT_TRUE(loaded) << loaded.error().message;
  if (!loaded) return true;
  EXPECT_EQ((*loaded)->model.blobs.size(), world);
  for (uint32_t rank = 0; rank < (*loaded)->model.blobs.size(); ++rank) {
    const auto bytes =
        ReadWhole(*storage, StrCat("blobs/", (*loaded)->model.blobs[rank].path), 1 << 26);
    EXPECT_TRUE(bytes && WithoutProof(*bytes) == RankFileOf(step, rank, world, elements))
        << "rank " << rank;
    const Blob& blob = (*loaded)->model.blobs[rank];
    if (!bytes || blob.chunk_list == Digest{}) continue;
    const auto list = ReadChunkList(*RootBelow(storage, "blobs"), blob);
    EXPECT_TRUE(list && *list == ChunkDigestsOf(*bytes)) << "rank " << rank;
  }
  return true;
}

}  // namespace ckptfs::testing_support
