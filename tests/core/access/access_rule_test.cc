// SPDX-License-Identifier: Apache-2.0

#include "core/access/access_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace ckptfs {
namespace {

using Groups = std::vector<uint32_t>;

const std::vector<Groups> kMemberships{{3}, {0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}};

// POSIX, written down once more.
bool MayPass(const OwnerAndMode& gate, uint32_t right, uint32_t user, const Groups& groups) {
  const uint32_t mode = gate.acl ? gate.mode & 0700 : gate.mode;
  if (user == gate.uid) return (mode & right << 6) != 0;
  if (std::ranges::find(groups, gate.gid) != groups.end()) return (mode & right << 3) != 0;
  return (mode & right) != 0;
}

class Gates {
 public:
  std::vector<OwnerAndMode> Make(size_t most, uint32_t usual) {
    std::vector<OwnerAndMode> gates(1 + random_() % most);
    for (OwnerAndMode& gate : gates) {
      gate.mode = random_() % 4 == 0 ? 0777 & ~static_cast<uint32_t>(random_() % 512) : usual;
      gate.uid = random_() % 3;
      gate.gid = random_() % 3;
      gate.acl = random_() % 8 == 0;
    }
    return gates;
  }

 private:
  std::mt19937 random_{3};
};

template <class Ask>
void ForEachCaller(Ask&& ask) {
  for (uint32_t user = 1; user < 4; ++user) {
    for (const Groups& groups : kMemberships) ask(user, groups);
  }
}

TEST(AccessRuleTest, GatesAreThoseOfPosix) {
  const OwnerAndMode file{0640, 10, 20};
  EXPECT_TRUE(file.Lets(04, 10, Groups{99}));
  EXPECT_TRUE(file.Lets(04, 11, Groups{99, 20}));
  EXPECT_FALSE(file.Lets(04, 11, Groups{99}));
  EXPECT_TRUE(file.Lets(04, 0, {}));
  EXPECT_FALSE((OwnerAndMode{0404, 10, 20}.Lets(04, 11, Groups{20})))
      << "a member gets the group's bits, not the others'";
  EXPECT_TRUE((OwnerAndMode{0711, 10, 20}.Lets(01, 11, Groups{99}))) << "search is enough";
  EXPECT_FALSE((OwnerAndMode{0744, 10, 20}.Lets(01, 11, Groups{99})));
  EXPECT_FALSE((OwnerAndMode{0777, 10, 20, true}.Lets(01, 11, Groups{20})))
      << "with an ACL the owner's bits alone are certain";
}

TEST(AccessRuleTest, ARuleLetsThoseWhoPassEveryGateAndItsBitsLetNoOthersWhereItIsExact) {
  Gates make;
  int let = 0, exact = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto files = make.Make(3, 0644);
    const auto directories = make.Make(2, 0755);
    const AccessRule rule = MakeAccessRule(files, directories);
    const OwnerAndMode shown{rule.read_bits, rule.uid, rule.gid};
    ForEachCaller([&](uint32_t user, const Groups& groups) {
      const auto pass = [&](uint32_t right) {
        return [&, right](const OwnerAndMode& gate) { return MayPass(gate, right, user, groups); };
      };
      const bool want =
          std::ranges::all_of(files, pass(04)) && std::ranges::all_of(directories, pass(01));
      ASSERT_EQ(rule.Lets(user, groups), want) << round;
      let += want;
      if (!rule.exact) return;
      ++exact;
      ASSERT_EQ(MayPass(shown, 04, user, groups), want) << round;
    });
  }
  EXPECT_GT(let, 10000);
  EXPECT_GT(exact, 10000);
  EXPECT_FALSE(MakeAccessRule({}, {}).Lets(1, Groups{1}));
}

TEST(AccessRuleTest, TheTightestAccessIsAsStrictAsEveryFile) {
  Gates make;
  int passed = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto files = make.Make(3, 0644);
    const OwnerAndMode tightest = TightestAccess(files);
    ForEachCaller([&](uint32_t user, const Groups& groups) {
      if (!MayPass(tightest, 04, user, groups)) return;
      ++passed;
      for (const OwnerAndMode& file : files) {
        ASSERT_TRUE(MayPass(file, 04, user, groups)) << round;
      }
    });
  }
  EXPECT_GT(passed, 10000);
  const std::vector<OwnerAndMode> alike(5, OwnerAndMode{0640, 7, 8});
  EXPECT_EQ(TightestAccess(alike), (OwnerAndMode{0640, 7, 8}));
  EXPECT_EQ(TightestAccess(std::vector<OwnerAndMode>{{0644, 7, 8}, {0600, 7, 8}}),
            (OwnerAndMode{0600, 7, 8}));
  EXPECT_EQ(TightestAccess(std::vector<OwnerAndMode>{{0644, 7, 8, true}}),
            (OwnerAndMode{0600, 7, 8}));
}

TEST(AccessRuleTest, AGateLetsAllWhoPassAnotherOnlyIfEachCallerDoes) {
  Gates make;
  int let = 0;
  for (int round = 0; round < 20000; ++round) {
    OwnerAndMode known = make.Make(1, 0644)[0];
    known.acl = false;  // an ACL may let others read, whom nobody can name
    const OwnerAndMode gate = make.Make(1, 0755)[0];
    if (!LetsAllOf(known, 04, gate, 01)) continue;
    ++let;
    ForEachCaller([&](uint32_t user, const Groups& groups) {
      if (MayPass(known, 04, user, groups)) {
        ASSERT_TRUE(MayPass(gate, 01, user, groups)) << round;
      }
    });
  }
  EXPECT_GT(let, 5000);
}

}  // namespace
}  // namespace ckptfs
