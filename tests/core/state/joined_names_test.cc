// SPDX-License-Identifier: Apache-2.0
#include "core/state/joined_names.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace ckptfs {
namespace {

using Names = std::vector<std::string>;
using Joined = std::map<std::string, std::string>;

TEST(JoinedNamesTest, OnePartMoreInEachName) {
  const struct {
    const char* about;
    Names model, optimizer;
    Joined joined;
  } cases[] = {
      {"the same", {"a", "b"}, {"b", "a"}, {{"a", "a"}, {"b", "b"}}},
      {"an adapter's name",
       {"m.0.lora_A.weight", "m.0.lora_B.weight"},
       {"m.0.lora_A.default.weight", "m.0.lora_B.default.weight"},
       {{"m.0.lora_A.default.weight", "m.0.lora_A.weight"},
        {"m.0.lora_B.default.weight", "m.0.lora_B.weight"}}},
      {"and a whole module",
       {"m.lora_A.weight", "score.weight"},
       {"m.lora_A.mine.weight", "score.modules_to_save.mine.weight"},
       {{"m.lora_A.mine.weight", "m.lora_A.weight"},
        {"score.modules_to_save.mine.weight", "score.weight"}}},
      {"DDP",
       {"a.weight", "a.bias"},
       {"module.a.weight", "module.a.bias"},
       {{"module.a.weight", "a.weight"}, {"module.a.bias", "a.bias"}}},
      {"one of them is not the model's: none is joined",
       {"a.weight"},
       {"module.a.weight", "module.b.weight"},
       {}},
      {"but names that both have",
       {"a.weight", "b.weight"},
       {"module.a.weight", "x", "b.weight"},
       {{"b.weight", "b.weight"}}},
      {"a name that is joined already is not given twice",
       {"a.weight"},
       {"a.weight", "module.a.weight"},
       {{"a.weight", "a.weight"}}},
      {"another model's name before it",
       {"0.weight", "0.bias"},
       {"critic.0.weight", "critic.0.bias"},
       {}},
      {"torch.compile", {"a.weight"}, {"_orig_mod.a.weight"}, {{"_orig_mod.a.weight", "a.weight"}}},
      {"two parts would do", {"module.lora_A.w", "lora_A.own.w"}, {"module.lora_A.own.w"}, {}},
      {"layers are not parts that may go",
       {"l.0.w", "l.w"},
       {"l.0.w", "l.1.w", "l.2.w"},
       {{"l.0.w", "l.0.w"}}},
      {"another part in each", {"a.lora_A.w", "b.lora_A.w"}, {"a.lora_A.x.w", "b.lora_A.y.w"}, {}},
  };
  for (const auto& one : cases)
    EXPECT_EQ(JoinNames(one.model, one.optimizer), one.joined) << one.about;
}

TEST(JoinedNamesTest, OneNameAlone) {
  const auto joined = [](std::string_view live, const Names& model) {
    const auto found = JoinName(
        live, [&](std::string_view name) { return std::ranges::find(model, name) != model.end(); });
    return found ? found->name + " without " + found->part : "";
  };
  EXPECT_EQ(joined("m.lora_A.own.weight", {"m.lora_A.weight"}), "m.lora_A.weight without own");
  EXPECT_EQ(joined("s.modules_to_save.own.weight", {"s.weight"}), "s.weight without own");
  EXPECT_EQ(joined("e.trainable_tokens_delta.own", {"e.trainable_tokens_delta"}),
            "e.trainable_tokens_delta without own");
  EXPECT_EQ(joined("critic.0.weight", {"0.weight"}), "");
  std::string deep = "w";
  while (deep.size() < 2 * kMaxNameParts - 3) deep += ".w";
  EXPECT_EQ(joined("module." + deep, {deep}), deep + " without module");
  EXPECT_EQ(joined("module.w." + deep, {"w." + deep}), "");
  EXPECT_EQ(joined("module.lora_A.own.w", {"lora_A.own.w", "module.lora_A.w"}), "");
}

}  // namespace
}  // namespace ckptfs
