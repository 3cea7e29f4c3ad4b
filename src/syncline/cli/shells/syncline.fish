# What fish completes after `syncline`. Made by `syncline completion fish`:
#     syncline completion fish > ~/.config/fish/completions/syncline.fish

function __syncline_words
    switch "$argv[1]"
@TABLE@
        case "*"
            return 1
    end
end

function __syncline_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    set -l verb ""
    set -l option ""
    set -l place ""
    for word in $words[2..-1]
        if test -n "$option"
            set option ""
        else if test -z "$place"; and string match -q -- "-*" $word
            __syncline_words "$verb $word" >/dev/null; and set option $word
        else if test -z "$place"; and __syncline_words (string trim -- "$verb $word") >/dev/null
            set verb (string trim -- "$verb $word")
        else
            __syncline_words "$verb @rest" >/dev/null; and set place 1
        end
    end
    set -l list
    if test -n "$option"; and string match -q -- "*=*" "$current"
        set list (__syncline_words "$option "(string replace -r "=.*" "=" -- "$current"))
    else if test -n "$option"
        set list (__syncline_words "$verb $option")
    else if test -n "$place"
        set list "@file"
    else if string match -q -- "-*" "$current"
        set list (__syncline_words "$verb -")
    else
        set list (__syncline_words "$verb") (__syncline_words "$verb @")
    end
    for word in (string split -n " " -- $list)
        switch $word
            case "@toml"
                for name in $current*.toml $current*/
                    echo $name
                end
            case "@file"
                __fish_complete_path "$current"
            case "@none"
            case "*"
                echo $word
        end
    end
end

complete -c syncline -f -a "(__syncline_complete)"
