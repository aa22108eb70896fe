// SPDX-License-Identifier: Apache-2.0
//
// A save of many machines costs each daemon a few calls, however many machines there are.
// The daemon with rank 0 reads each part once, and is the only one that makes the model.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/manifest/manifest_format.h"
#include "core/records/records.h"
#include "tests/core/store/counting_storage.h"
#include "tests/snapshot/landings.h"
#include "tests/snapshot/nodes.h"

namespace ckptfs {
namespace {

using testing_support::AttemptOf;
using testing_support::CountingStorage;
using testing_support::IsStepThere;
using testing_support::RankFileOf;
using testing_support::StorageCalls;

constexpr std::chrono::minutes kRarely{10};  // between beats: these are not counted

// A machine with one rank.
struct Machine {
  Machine(const std::shared_ptr<Storage>& disk, std::atomic<int>& made,
          std::chrono::milliseconds slow = {})
      : storage(std::make_shared<CountingStorage>(disk)),
        store(*Store::OpenOn(storage)),
        commit(
            *store,
            [&made, slow](const auto& blobs, const auto& paths) {
              ++made;
              std::this_thread::sleep_for(slow);
              return ModelOfRankFiles()(blobs, paths);
            },
            kRarely) {}

  Status Prepare(const AttemptName& name, uint32_t rank, uint32_t world, uint64_t elements = 1000) {
    auto text = std::make_shared<std::string>(RankFileOf(7, rank, world, elements));
    PreparedPart part{name, 7, world, 0, {{rank, text->size(), ChunkDigestsOf(*text)}}};
    MemoryRoot bytes("handed over");
    CKPT_RETURN_IF_ERROR(bytes.Add(part.PathOf(rank), {std::as_bytes(std::span(*text))}, text, {}));
    return commit.Prepare(std::move(part), bytes);
  }

  std::shared_ptr<CountingStorage> storage;
  std::unique_ptr<Store> store;
  WorldCommit commit;
};

struct Costs {
  StorageCalls leader;
  StorageCalls most;  // of any other
};

StorageCalls MostOf(const StorageCalls& a, const StorageCalls& b) {
  return {std::max(a.lists, b.lists), std::max(a.listed, b.listed), std::max(a.reads, b.reads),
          std::max(a.stats, b.stats), std::max(a.writes, b.writes)};
}

// A leader reads of a part, and a manifest says of a rank's file, as much however large the file
// is.
TEST(CommitCostTest, RecordsDoNotGrowWithTheBytesOfFiles) {
  const auto sizes = [](uint64_t elements) {
    const auto disk = std::make_shared<MemoryRoot>("storage");
    std::atomic<int> made = 0;
    std::vector<std::unique_ptr<Machine>> all;
    for (uint32_t i = 0; i < 2; ++i) all.push_back(std::make_unique<Machine>(disk, made));
    const AttemptName name = AttemptOf(1, 2);
    for (uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(all[i]->Prepare(name, i, 2, elements));
    uint64_t parts = 0;
    for (const std::string& path : testing_support::RecordsIn(*disk)) {
      parts += ReadWhole(*disk, path, kPreparedMaxBytes)->size();
    }
    const auto published = all[0]->commit.Look(name, true);
    EXPECT_TRUE(published && published->state == AttemptNews::State::kDurable);
    EXPECT_TRUE(IsStepThere(disk, "7", 7, 2, elements));
    const std::string manifest = ManifestName(published->record->manifest);
    return std::pair(parts, ReadWhole(*disk, manifest, kManifestMaxPayload)->size());
  };
  const auto small = sizes(200'000), large = sizes(4'000'000);  // 4 and 62 chunks a rank
  EXPECT_LE(large.first, small.first + 4) << "numbers have more digits";
  EXPECT_LE(large.second, small.second + 64);
}

// One save by `machines` daemons, who look twice before the leader is done.
Costs CostsOf(uint32_t machines) {
  const auto disk = std::make_shared<MemoryRoot>("storage");
  std::atomic<int> made = 0;
  std::vector<std::unique_ptr<Machine>> all;
  for (uint32_t i = 0; i < machines; ++i) all.push_back(std::make_unique<Machine>(disk, made));
  const AttemptName name = AttemptOf(1, machines);
  for (const auto& one : all) one->storage->Take();
  for (uint32_t i = 0; i < machines; ++i) EXPECT_TRUE(all[i]->Prepare(name, i, machines));
  for (uint32_t i = 1; i < machines; ++i) {
    for (int turn = 0; turn < 2; ++turn) EXPECT_FALSE(all[i]->commit.Glance(name)->has_value());
  }
  const auto published = all[0]->commit.Look(name, true);
  EXPECT_TRUE(published && published->state == AttemptNews::State::kDurable);
  for (uint32_t i = 1; i < machines; ++i) {
    const auto news = all[i]->commit.Glance(name);
    EXPECT_TRUE(news && *news && (*news)->state == AttemptNews::State::kDurable);
  }
  EXPECT_TRUE(all[0]->commit.FinishOthers(WorldCommit::Clock::now(), kRarely));
  Costs costs{all[0]->storage->Take(), {}};
  for (uint32_t i = 1; i < machines; ++i) {
    costs.most = MostOf(costs.most, all[i]->storage->Take());
  }
  EXPECT_EQ(made, 1);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, machines));
  EXPECT_TRUE(testing_support::RecordsIn(*disk).empty());
  return costs;
}

// The daemons find each other, and look for what others left.
Costs CostsOfMeeting(uint32_t machines) {
  const auto disk = std::make_shared<MemoryRoot>("storage");
  std::atomic<int> made = 0;
  std::vector<std::unique_ptr<Machine>> all;
  for (uint32_t i = 0; i < machines; ++i) all.push_back(std::make_unique<Machine>(disk, made));
  // Their names are random: the one that looks for all others never has rank 0, too.
  constexpr uint32_t kFirst = 1;
  std::iter_swap(all.begin() + kFirst, std::ranges::min_element(all, {}, [](const auto& one) {
                   return one->commit.node();
                 }));
  const auto join = [&](uint32_t i) {
    return all[i]->commit.Join({"run", "job", machines, "", {{i, 100 + i}}});
  };
  for (const auto& one : all) one->storage->Take();
  for (uint32_t i = machines; i-- > 0;) EXPECT_TRUE(join(i));
  for (uint32_t i = 0; i < machines; ++i) {
    const auto world = join(i);
    EXPECT_TRUE(world && world->life == testing_support::LifeOfWorld(machines)) << i;
    EXPECT_EQ(world->elsewhere.size(), machines - 1);
  }
  Costs costs;
  for (uint32_t i = 0; i < machines; ++i) {
    EXPECT_TRUE(all[i]->commit.FinishOthers(WorldCommit::Clock::now(), kRarely));
    const StorageCalls calls = all[i]->storage->Take();
    StorageCalls& of = i == 0 || i == kFirst ? costs.leader : costs.most;
    of = MostOf(of, calls);
  }
  return costs;
}

void ExpectLinear(Costs (*costs_of)(uint32_t), bool lists_nodes) {
  const Costs few = costs_of(4);
  for (const uint32_t machines : {16, 64, 256}) {
    Costs many = costs_of(machines);
    SCOPED_TRACE(machines);
    const auto share = [&](uint64_t calls) { return (calls + 4) * machines / 4; };
    EXPECT_LE(many.leader.reads, share(few.leader.reads));
    EXPECT_LE(many.leader.stats, share(few.leader.stats));
    EXPECT_LE(many.leader.listed, share(few.leader.listed));
    EXPECT_LE(many.leader.lists, few.leader.lists + 4);  // what the first daemon looks at
    EXPECT_LE(many.leader.writes, few.leader.writes);
    if (lists_nodes) {  // once, and reads one of them
      EXPECT_EQ(many.most.listed - machines, few.most.listed - 4);
      many.most.listed = few.most.listed;
    }
    EXPECT_EQ(many.most, few.most);
  }
}

TEST(CommitCostTest, ADaemonsCallsDoNotDependOnTheNumberOfMachines) {
  ExpectLinear(CostsOf, false);
}

TEST(CommitCostTest, TheOneWithRank0ReadsWhatAllSayAndOthersReadOneRecord) {
  ExpectLinear(CostsOfMeeting, true);
}

ReceivedFile FileOfRank(uint32_t rank, uint32_t world) {
  auto text = std::make_shared<std::string>(RankFileOf(7, rank, world));
  ReceivedFile file;
  file.bytes = text->size();
  file.rope = {std::as_bytes(std::span(*text))};
  file.chunks = ChunkDigestsOf(*text);
  file.lease = text;
  return file;
}

TEST(CommitCostTest, ASlowLeaderIsNotHelpedByThoseWhoWaitForIt) {
  constexpr uint32_t kMachines = 4;
  const auto disk = std::make_shared<MemoryRoot>("storage");
  std::atomic<int> made = 0;
  testing_support::FakeSteps steps;
  std::vector<std::unique_ptr<Machine>> machines;
  std::vector<std::unique_ptr<Landing>> landings;
  for (uint32_t rank = 0; rank < kMachines; ++rank) {
    // As long as a hundred turns.
    machines.push_back(std::make_unique<Machine>(disk, made, std::chrono::milliseconds(500)));
    landings.push_back(
        std::make_unique<Landing>(LandingOptions{.steps = &steps,
                                                 .commit = &machines.back()->commit,
                                                 .turn = std::chrono::milliseconds(5)}));
    ASSERT_TRUE(landings.back()->Start());
  }
  const auto seen = [&](uint32_t rank) {
    landings[rank]->See({"run", "job", kMachines, "", {{rank, 100 + rank}}});
    const auto world = landings[rank]->WorldOf("run", "job");
    return world && world->life;
  };
  for (uint32_t rank = 0; rank < kMachines; ++rank) {
    while (!seen(rank)) {
      for (uint32_t other = 0; other < kMachines; ++other) (void)seen(other);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  for (uint32_t rank = 0; rank < kMachines; ++rank) {
    ReceivedPart part{AttemptOf(1, kMachines), 7, kMachines, {}, std::chrono::steady_clock::now()};
    part.files[rank] = FileOfRank(rank, kMachines);
    landings[rank]->Take(std::move(part));
  }
  for (const auto& landing : landings) {
    while (landing->status().durable + landing->status().dropped == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(landing->status().last_drop, "");
  }
  EXPECT_EQ(made, 1);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, kMachines));
}

}  // namespace
}  // namespace ckptfs
